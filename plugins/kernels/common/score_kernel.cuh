// SPDX-License-Identifier: Apache-2.0
//
// The score_slots kernel. One persistent thread block per multiprocessor streams its share of the
// batch's key tiles: producer warps keep a deep ring of bulk copies in flight, and warpgroups of
// consumers take the tiles in turn, multiply, and reduce over heads. At one row the kernel runs at
// the speed of memory; the ring is there to keep enough bytes in flight for that.

#pragma once

#include <cstdint>

#include "score_arithmetic.cuh"
#include "score_plan.cuh"
#include "score_ptx.cuh"
#include "score_wgmma.cuh"

namespace spin::score {

// Shared memory: the query (the tensor cores want 1024-byte alignment), the ring, the rest.
struct Shared {
    uint8_t* query;
    uint8_t* ring;
    Control& control;
};

// Where a warpgroup and its producer are in their part of the ring. A stage serves one warpgroup
// only: copies may land in any order, so a stage that changed hands could be taken for full while
// its earlier copy is still under way.
struct RingPosition {
    int stage;
    uint32_t parity;  // of the round: how often the position has come around

    __device__ __forceinline__ RingPosition(int warpgroup, int stages)
        : stage(warpgroup * stages), parity(0), first_(stage), end_(stage + stages) {}

    __device__ __forceinline__ void advance() {
        if (++stage == end_) {
            stage = first_;
            parity ^= 1;
        }
    }

private:
    int first_, end_;
};

// The copies that bring a chunk: its keys and its scales, or both at once when the chunk is a whole
// page. Nothing is copied for a chunk without a visible slot.
struct Chunk {
    const uint8_t* keys;
    const uint8_t* scales;
    uint32_t key_bytes;
    uint32_t scale_bytes;
    int visible;  // slots, 0..chunk size
};

__device__ __forceinline__ Chunk locate_chunk(const ScoreArgs& args, int sequence, int column) {
    Chunk chunk = {};
    const int index = column >> args.log2_block;
    int block = index;
    if (args.block_list != nullptr) {
        if (index >= kept_blocks(args, sequence)) {
            return chunk;
        }
        block = args.block_list[sequence * args.block_list_stride + index];
    }
    const int visible = visible_slots(args, sequence);
    // Compared as blocks first, so that no block number can overflow the slot number.
    if (block < 0 || block > visible >> args.log2_block) {
        return chunk;
    }
    const int slot = (block << args.log2_block) + (column & ((1 << args.log2_block) - 1));
    const int room = static_cast<int>(min(args.score_stride - column, int64_t{kTileSlots}));
    const int page_slots = 1 << args.log2_page, chunk_slots = 1 << args.log2_chunk;
    const int count = min(min(visible - slot, room), chunk_slots);
    if (count <= 0) {
        return chunk;
    }
    const int page = args.page_table[sequence * args.page_table_stride + (slot >> args.log2_page)];
    if (page < 0 || page >= args.num_pages) {
        return chunk;
    }
    const int first = slot & (page_slots - 1);
    const uint8_t* const bytes = args.pages + (int64_t{page} << args.log2_page) * kKeyBytes;
    chunk.keys = bytes + first * kKeyDim;
    chunk.scales = bytes + page_slots * kKeyDim + first * kScaleBytes;
    chunk.key_bytes = count * kKeyDim;
    chunk.scale_bytes = (count + 3) / 4 * 4 * kScaleBytes;  // copies are of whole 16 bytes
    chunk.visible = count;
    if (count == page_slots) {
        chunk.key_bytes += chunk.scale_bytes;
        chunk.scale_bytes = 0;
    }
    return chunk;
}

// A producer warp, one for each warpgroup of consumers. Its lanes look up 32 chunks at a time, then
// start the copies tile by tile as the ring has room; a tile's chunks belong to neighbouring lanes.
__device__ __forceinline__ void produce(const ScoreArgs& args, const Shared& shared,
                                        const Share& share, int warpgroup) {
    Control& control = shared.control;
    const int lane = threadIdx.x % 32;
    const int log2_chunks = kLog2TileSlots - args.log2_chunk;  // chunks per tile
    const int tiles_at_once = 32 >> log2_chunks;
    const int my_tile = lane >> log2_chunks, my_chunk = lane & ((1 << log2_chunks) - 1);
    const int chunk_slots = 1 << args.log2_chunk;

    RingPosition at(warpgroup, args.stages);
    uint8_t* const my_place = shared.ring + my_chunk * chunk_slots * kKeyBytes;
    int sequence = share.sequence;
    for (int base = share.begin + warpgroup; base < share.end;
         base += tiles_at_once * kWarpgroups) {
        const int tile = base + my_tile * kWarpgroups;
        Chunk chunk = {};
        if (tile < share.end) {
            while (tile >= control.first_tile[sequence + 1]) {
                ++sequence;
            }
            chunk = locate_chunk(
                args, sequence,
                (tile - control.first_tile[sequence]) * kTileSlots + my_chunk * chunk_slots);
        }
        const int tiles = min(tiles_at_once, (share.end - base + kWarpgroups - 1) / kWarpgroups);
        for (int i = 0; i < tiles; ++i) {
            wait(&control.empty[at.stage], at.parity ^ 1);
            if (i == my_tile) {
                uint8_t* const to = my_place + at.stage * kTileBytes;
                uint64_t* const full = &control.full[at.stage];
                control.visible_slots[at.stage][my_chunk] = chunk.visible;
                arrive_expecting(full, chunk.key_bytes + chunk.scale_bytes);
                if (chunk.key_bytes > 0) {
                    copy_bulk(to, chunk.keys, chunk.key_bytes, full);
                }
                if (chunk.scale_bytes > 0) {
                    copy_bulk(to + chunk_slots * kKeyDim, chunk.scales, chunk.scale_bytes, full);
                }
            }
            at.advance();
        }
    }
}

// Brings a sequence's query rows and weights to shared memory. All consumers call it together.
template <class Arithmetic, int kHeads>
__device__ __forceinline__ void load_query(const ScoreArgs& args, const Shared& shared,
                                           int sequence) {
    const int64_t first_head = int64_t{sequence} * args.rows_per_sequence * kHeads;
    const int heads = args.rows * kHeads;
    constexpr int kPieces = kKeyDim / 16;
    const uint4* query = reinterpret_cast<const uint4*>(args.query) + first_head * kPieces;
    sync_threads<1, kConsumerThreads>();  // everyone is done with the sequence before
    for (int i = threadIdx.x; i < heads * kPieces; i += kConsumerThreads) {
        const int head = i / kPieces;
        Arithmetic::store_query(shared.query + head / kHeads * Arithmetic::kQueryRowBytes,
                                head % kHeads, i % kPieces, query[i]);
    }
    for (int i = threadIdx.x; i < heads; i += kConsumerThreads) {
        shared.control.weights[i] = args.weights[first_head + i];
    }
    publish_to_tensor_cores();
    sync_threads<1, kConsumerThreads>();
}

// A thread's weights of one row: heads 2t and 2t + 1 of every group of eight.
template <int kHeads>
struct HeadWeights {
    float2 pair[kHeads / 8];

    __device__ __forceinline__ void load(const float* row) {
        const float2* pairs = reinterpret_cast<const float2*>(row) + threadIdx.x % 4;
#pragma unroll
        for (int group = 0; group < kHeads / 8; ++group) {
            pair[group] = pairs[group * 4];
        }
    }
};

// Sums weighted products over the heads: this thread's, then the quad's. Threads with an even t end
// up with the sum of row g, the others with that of row g + 8. The order never changes.
template <int kHeads>
__device__ __forceinline__ float reduce_heads(const Products<kHeads>& products,
                                              const HeadWeights<kHeads>& weights) {
    float sums[2][2] = {};
#pragma unroll
    for (int group = 0; group < kHeads / 8; ++group) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float2 weight = weights.pair[group];
            sums[row][0] = fmaf(weight.x, relu(products[group][2 * row]), sums[row][0]);
            sums[row][1] = fmaf(weight.y, relu(products[group][2 * row + 1]), sums[row][1]);
        }
    }
    const float upper = sums[0][0] + sums[0][1], lower = sums[1][0] + sums[1][1];
    const bool odd = threadIdx.x % 2;
    float mine = odd ? lower : upper;
    mine += __shfl_xor_sync(~0u, odd ? upper : lower, 1);
    return mine + __shfl_xor_sync(~0u, mine, 2);
}

// The consumers: warpgroup w takes tiles w, w + kWarpgroups, ... of the share, its warp v the slots
// 16v..16v + 15 of each.
template <class Arithmetic, int kHeads, bool kSingleRow>
__device__ __forceinline__ void consume(const ScoreArgs& args, const Shared& shared,
                                        const Share& share) {
    Control& control = shared.control;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_slot = threadIdx.x / 32 % 4 * 16;
    const int warp_chunk = warp_slot >> args.log2_chunk;
    const int chunk_slots = 1 << args.log2_chunk;
    const int slot = (warp_slot & (chunk_slots - 1)) + g;  // in the chunk; the other is slot + 8
    const int my_slot = slot + t % 2 * 8;                  // whose score this thread ends up with
    const int chunk_offset = warp_chunk * chunk_slots * kKeyBytes;
    const int scale_offset = chunk_offset + chunk_slots * kKeyDim + my_slot * kScaleBytes;
    // Rows of 128 bytes all start at the same bank. Quads with an odd g therefore load their two
    // pieces in the opposite order, so that every eight lanes read 128 different bytes.
    const int parity = g % 2;
    const int key_offset = chunk_offset + slot * kKeyDim + t * 16 + parity * 64;
    const int other_half = parity ? -64 : 64;

    const int warpgroup = threadIdx.x / kWarpgroupThreads;
    RingPosition at(warpgroup, args.stages);
    HeadWeights<kHeads> weights;
    int tile = share.begin + warpgroup;
    int segment = share.begin;
    for (int sequence = share.sequence; segment < share.end; ++sequence) {
        const int segment_end = min(control.first_tile[sequence + 1], share.end);
        if (segment_end <= segment) {
            continue;  // a sequence without visible slots
        }
        segment = segment_end;
        load_query<Arithmetic, kHeads>(args, shared, sequence);
        if constexpr (kSingleRow) {
            weights.load(control.weights);
        }
        float* const scores =
            args.scores + int64_t{sequence} * args.rows_per_sequence * args.score_stride;

        for (; tile < segment_end; tile += kWarpgroups) {
            wait(&control.full[at.stage], at.parity);
            const uint8_t* const stage = shared.ring + at.stage * kTileBytes;
            KeyPieces pieces;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const uint8_t* const key = stage + key_offset + row * 8 * kKeyDim;
                const uint4 first = *reinterpret_cast<const uint4*>(key);
                const uint4 second = *reinterpret_cast<const uint4*>(key + other_half);
                pieces[row][0] = parity ? second : first;
                pieces[row][1] = parity ? first : second;
            }
            const float scale = *reinterpret_cast<const float*>(stage + scale_offset);
            const bool visible = my_slot < control.visible_slots[at.stage][warp_chunk];
            const typename Arithmetic::Keys keys(pieces);
            __syncwarp();
            if (lane == 0) {
                arrive(&control.empty[at.stage]);
            }
            at.advance();

            const int column =
                (tile - control.first_tile[sequence]) * kTileSlots + warp_slot + g + t % 2 * 8;
            float* score = scores + column;
            const int rows = kSingleRow ? 1 : args.rows;
            for (int row = 0; row < rows; ++row) {
                if constexpr (!kSingleRow) {
                    weights.load(control.weights + row * kHeads);
                }
                Products<kHeads> products;
                Arithmetic::multiply(products, keys,
                                     shared.query + row * Arithmetic::kQueryRowBytes);
                const float sum = reduce_heads<kHeads>(products, weights);
                if (t < 2 && visible) {
                    *score = scale * sum;
                }
                score += args.score_stride;
            }
        }
    }
}

template <class Arithmetic, int kHeads, bool kSingleRow>
__global__ void __launch_bounds__(kThreads, 1)
    score_slots_kernel(const __grid_constant__ ScoreArgs args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    uint8_t* const ring = memory + args.rows * Arithmetic::kQueryRowBytes;
    Control& control = *reinterpret_cast<Control*>(ring + args.stages * kWarpgroups * kTileBytes);
    const Shared shared = {memory, ring, control};

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < args.stages * kWarpgroups; ++stage) {
            init_barrier(&control.full[stage], kTileSlots >> args.log2_chunk);
            init_barrier(&control.empty[stage], kWarpgroupThreads / 32);
        }
        publish_barriers();
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const Share share = plan_share(args, control);  // also publishes the barriers to the block
    if (threadIdx.x >= kConsumerThreads) {
        produce(args, shared, share, (threadIdx.x - kConsumerThreads) / 32);
    } else {
        consume<Arithmetic, kHeads, kSingleRow>(args, shared, share);
    }
}

}  // namespace spin::score
