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

// Shared memory: the queries (the tensor cores want 1024-byte alignment), the ring, the rest.
struct Shared {
    uint8_t* queries;
    uint8_t* ring;
    Control& control;
};

// Where a party is in its part of a ring. A stage of the tile ring serves one warpgroup only:
// copies may land in any order, so a stage that changed hands could be taken for full while its
// earlier copy is still under way.
struct RingPosition {
    int stage;
    uint32_t parity;  // of the round: how often the position has come around

    __device__ __forceinline__ RingPosition(int part, int stages)
        : stage(part * stages), parity(0), first_(stage), end_(stage + stages) {}

    __device__ __forceinline__ void advance() {
        if (++stage == end_) {
            stage = first_;
            parity ^= 1;
        }
    }

private:
    int first_, end_;
};

// The copies that bring a chunk: its keys and its scales. A chunk without a visible slot has none.
struct Chunk {
    const uint8_t* keys;
    const uint8_t* scales;
    uint32_t key_bytes;
    uint32_t scale_bytes;
    int visible;  // slots, 0..chunk size
};

__device__ __forceinline__ Chunk locate_chunk(const ScoreArgs& args, int sequence, int tile_column,
                                              int chunk_of_tile) {
    Chunk chunk = {};
    const int visible = visible_slots(args, sequence);
    const int column = tile_column + (chunk_of_tile << args.log2_chunk);
    const int index = column >> args.log2_block;
    int block = index;
    if (args.block_list != nullptr) {
        if (index >= kept_blocks(args, sequence)) {
            return chunk;
        }
        block = args.block_list[sequence * args.block_list_stride + index];
    }
    // Compared as blocks first, so that no block number can overflow the slot number.
    if (block < 0 || block > visible >> args.log2_block) {
        return chunk;
    }
    const int slot = (block << args.log2_block) + (column & ((1 << args.log2_block) - 1));
    const int room = static_cast<int>(min(args.score_stride - column, int64_t{kTileSlots}));
    const int left = min(visible - slot, room);
    if (left <= 0) {
        return chunk;
    }
    const int page = args.page_table[sequence * args.page_table_stride + (slot >> args.log2_page)];
    if (page < 0 || page >= args.num_pages) {
        return chunk;
    }
    const int page_slots = 1 << args.log2_page;
    const int first = slot & (page_slots - 1);
    const uint8_t* const bytes =
        args.pages + int64_t{page} * page_slots * (kKeyBytes + kScaleBytes);
    chunk.keys = bytes + first * kKeyBytes;
    chunk.scales = bytes + page_slots * kKeyBytes + first * kScaleBytes;
    chunk.visible = min(left, 1 << args.log2_chunk);
    chunk.key_bytes = chunk.visible * kKeyBytes;
    chunk.scale_bytes = (chunk.visible + 3) / 4 * 4 * kScaleBytes;  // copies are of whole 16 bytes
    // When a tile is a whole page, all its scales come along with the second half of its keys.
    if (args.log2_page == kLog2TileSlots && args.log2_block >= kLog2TileSlots &&
        left >= kTileSlots - chunk_of_tile * kHalfSlots) {
        chunk.key_bytes += chunk_of_tile * kTileSlots * kScaleBytes;
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
    const int my_slot = my_chunk << args.log2_chunk;
    uint8_t* const my_keys =
        shared.ring + my_slot / kHalfSlots * kSecondHalf + my_slot % kHalfSlots * kKeyBytes;
    uint8_t* const my_scales = shared.ring + kScales + my_slot * kScaleBytes;

    RingPosition at(warpgroup, share.stages);
    int sequence = share.sequence;
    for (int base = share.begin + warpgroup; base < share.end;
         base += tiles_at_once * kWarpgroups) {
        const int tile = base + my_tile * kWarpgroups;
        Chunk chunk = {};
        if (tile < share.end) {
            while (tile >= control.first_tile[sequence + 1]) {
                ++sequence;
            }
            const int tile_column = (tile - control.first_tile[sequence]) * kTileSlots;
            chunk = locate_chunk(args, sequence, tile_column, my_chunk);
        }
        const int tiles = min(tiles_at_once, (share.end - base + kWarpgroups - 1) / kWarpgroups);
        for (int i = 0; i < tiles; ++i) {
            wait(&control.empty[at.stage], at.parity ^ 1);
            __syncwarp();  // a lane left behind could take a later round for the one it awaits
            if (i == my_tile) {
                const int offset = at.stage * kTileBytes;
                uint64_t* const full = &control.full[at.stage];
                control.visible_slots[at.stage][my_chunk] = chunk.visible;
                arrive_expecting(full, chunk.key_bytes + chunk.scale_bytes);
                if (chunk.key_bytes > 0) {
                    copy_bulk(my_keys + offset, chunk.keys, chunk.key_bytes, full);
                }
                if (chunk.scale_bytes > 0) {
                    copy_bulk(my_scales + offset, chunk.scales, chunk.scale_bytes, full);
                }
            }
            at.advance();
        }
    }
}

// Calls visit(sequence, end of its tiles) for every sequence with tiles in the share.
template <class Visit>
__device__ __forceinline__ void for_each_segment(const Control& control, const Share& share,
                                                 Visit visit) {
    int begin = share.begin;
    for (int sequence = share.sequence; begin < share.end; ++sequence) {
        const int end = min(control.first_tile[sequence + 1], share.end);
        if (end > begin) {
            visit(sequence, end);
            begin = end;
        }
    }
}

// The query warp brings query rows and weights to shared memory, where there is room one sequence
// ahead of the consumers, who would otherwise all wait whenever a sequence begins.
template <class Arithmetic, int kHeads>
__device__ __forceinline__ void bring_queries(const ScoreArgs& args, const Shared& shared,
                                              const Share& share) {
    constexpr int kPieces = kKeyDim / 16;
    Control& control = shared.control;
    const int lane = threadIdx.x % 32;
    const int heads = args.rows * kHeads;
    RingPosition at(0, args.query_buffers);
    for_each_segment(control, share, [&](int sequence, int /*end*/) {
        const int64_t first_head = int64_t{sequence} * args.rows_per_sequence * kHeads;
        const uint4* query = reinterpret_cast<const uint4*>(args.query) + first_head * kPieces;
        uint8_t* const buffer = shared.queries + at.stage * args.rows * Arithmetic::kQueryRowBytes;
        const int64_t place = args.places != nullptr ? args.places[sequence] : sequence;
        wait(&control.query_empty[at.stage], at.parity ^ 1);
#pragma unroll 8
        for (int i = lane; i < heads * kPieces; i += 32) {
            const int head = i / kPieces;
            Arithmetic::store_query(buffer + head / kHeads * Arithmetic::kQueryRowBytes,
                                    head % kHeads, i % kPieces, query[i]);
        }
        if (lane == 0) {
            control.places[at.stage] = place;
        }
        for (int i = lane; i < heads; i += 32) {
            control.weights[at.stage][i] = args.weights[first_head + i];
        }
        publish_to_tensor_cores();
        arrive(&control.query_full[at.stage]);
        at.advance();
    });
}

// A thread's weights of some heads: 2t and 2t + 1 of every group of eight.
template <int kHeads>
struct HeadWeights {
    float2 pair[kHeads / 8];

    __device__ __forceinline__ void load(const float* heads) {
        const float2* pairs = reinterpret_cast<const float2*>(heads) + threadIdx.x % 4;
#pragma unroll
        for (int group = 0; group < kHeads / 8; ++group) {
            pair[group] = pairs[group * 4];
        }
    }
};

// This thread's sums of 2 * weight * relu(product): [row g or g + 8][even or odd heads].
using HeadSums = float[2][2];

// Adds the products of some heads. The order never changes.
template <int kGroups>
__device__ __forceinline__ void add_heads(HeadSums& sums, const float (&products)[kGroups][4],
                                          const HeadWeights<8 * kGroups>& weights) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        const float2 pair = weights.pair[group];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // x + |x| is exactly 2 relu(x), keeps NaN, and issues at twice the rate of a maximum.
            const float x = products[group][i];
            float& sum = sums[i / 2][i % 2];
            sum = fmaf(i % 2 ? pair.y : pair.x, x + fabsf(x), sum);
        }
    }
}

// Adds up a quad's sums. Threads with an even t end up with row g, the others with row g + 8.
__device__ __forceinline__ float add_quad(const HeadSums& sums) {
    const float upper = sums[0][0] + sums[0][1], lower = sums[1][0] + sums[1][1];
    const bool odd = threadIdx.x % 2;
    float mine = odd ? lower : upper;
    mine += __shfl_xor_sync(~0u, odd ? upper : lower, 1);
    return mine + __shfl_xor_sync(~0u, mine, 2);
}

// What a consumer thread reads of every tile, as shared memory addresses in the first stage. Quads
// alternate between the halves of a tile, for the banks' sake: the rows g and g + 8 of warp v are
// slots 8v + g / 2 and 8v + g / 2 + 4 of half g % 2.
struct ConsumerPlace {
    int my_slot;        // in the tile: whose score this thread ends up with
    int my_chunk_slot;  // the same, in its chunk
    uint32_t keys;
    uint32_t scale;
    uint32_t visible;

    __device__ __forceinline__ ConsumerPlace(const Shared& shared, int log2_chunk) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
        const int half = g % 2, half_slot = warp * 8 + g / 2;
        my_slot = half * kHalfSlots + half_slot + t % 2 * 4;
        const int chunk = my_slot >> log2_chunk;
        my_chunk_slot = my_slot - (chunk << log2_chunk);
        keys = shared_address(shared.ring) + half * kSecondHalf + half_slot * kKeyBytes + t * 16;
        scale = shared_address(shared.ring) + kScales + my_slot * kScaleBytes;
        visible = shared_address(&shared.control.visible_slots[0][chunk]);
        keep_in_registers(my_chunk_slot, keys, scale, visible);
    }
};

// A thread's share of a tile, in registers.
struct Fetched {
    KeyPieces pieces;
    float scale;
    int visible_slots;  // of the chunk

    // Waits for the tile, reads it and gives its stage back to the producer.
    __device__ __forceinline__ void fetch(Control& control, const ConsumerPlace& place,
                                          RingPosition& at) {
        wait(&control.full[at.stage], at.parity);
        const uint32_t offset = at.stage * kTileBytes;
        load_shared(scale, place.scale + offset);
        load_shared(visible_slots, place.visible + at.stage * kMaxChunks * sizeof(int));
        load_shared(pieces[0][0], place.keys + offset);
        load_shared(pieces[0][1], place.keys + offset + 64);
        load_shared(pieces[1][0], place.keys + offset + 4 * kKeyBytes);
        load_shared(pieces[1][1], place.keys + offset + 4 * kKeyBytes + 64);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            arrive(&control.empty[at.stage]);
        }
        at.advance();
    }
};

// The consumers: warpgroup w takes tiles w, w + kWarpgroups, ... of the share. The next tile comes
// to registers while this one is multiplied, if it is there by then, and else while it is reduced.
template <class Arithmetic, int kHeads, bool kSingleRow>
__device__ __forceinline__ void consume(const ScoreArgs& args, const Shared& shared,
                                        const Share& share) {
    Control& control = shared.control;
    const ConsumerPlace place(shared, args.log2_chunk);
    const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / kWarpgroupThreads;
    RingPosition at(warpgroup, share.stages), query_at(0, args.query_buffers);
    constexpr int kHeadsAtOnce = Arithmetic::kHeadsAtOnce;
    constexpr bool kWeightsStay = kSingleRow && kHeadsAtOnce == kHeads;
    HeadWeights<kHeadsAtOnce> weights;
    Fetched fetched;
    int tile = share.begin + warpgroup;
    if (tile < share.end) {
        fetched.fetch(control, place, at);
    }
    for_each_segment(control, share, [&](int sequence, int segment_end) {
        // The shuffle tells the compiler that the whole warp agrees on the query's address.
        const int buffer = __shfl_sync(~0u, query_at.stage, 0);
        const uint8_t* const query =
            shared.queries + buffer * args.rows * Arithmetic::kQueryRowBytes;
        const float* const row_weights = control.weights[buffer];
        wait(&control.query_full[query_at.stage], query_at.parity);
        if constexpr (kWeightsStay) {
            weights.load(row_weights);
        }
        float* score = args.scores +
                       control.places[buffer] * args.rows_per_sequence * args.score_stride +
                       (tile - control.first_tile[sequence]) * kTileSlots + place.my_slot;

        for (; tile < segment_end; tile += kWarpgroups, score += kWarpgroups * kTileSlots) {
            const typename Arithmetic::Keys keys(fetched.pieces);
            const float half_scale = 0.5f * fetched.scale;
            const bool writes = lane % 4 < 2 && place.my_chunk_slot < fetched.visible_slots;
            bool fetches = tile + kWarpgroups < share.end;
            if (fetches && __all_sync(~0u, is_complete(&control.full[at.stage], at.parity))) {
                fetched.fetch(control, place, at);
                fetches = false;
            }
            const int rows = kSingleRow ? 1 : args.rows;
            for (int row = 0; row < rows; ++row) {
                HeadSums sums = {};
#pragma unroll 2
                for (int head = 0; head < kHeads; head += kHeadsAtOnce) {
                    if constexpr (!kWeightsStay) {
                        weights.load(row_weights + row * kHeads + head);
                    }
                    Products<kHeadsAtOnce> products;
                    Arithmetic::multiply(products, keys, query + row * Arithmetic::kQueryRowBytes,
                                         head / 8);
                    if (row == 0 && head == 0 && fetches) {
                        fetched.fetch(control, place, at);
                    }
                    add_heads(sums, products, weights);
                }
                const float doubled = add_quad(sums);
                if (writes) {
                    score[row * args.score_stride] = half_scale * doubled;
                }
            }
        }
        arrive(&control.query_empty[query_at.stage]);
        query_at.advance();
    });
}

template <class Arithmetic, int kHeads, bool kSingleRow>
__global__ void __launch_bounds__(kThreads, 1)
    score_slots_kernel(const __grid_constant__ ScoreArgs args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    uint8_t* const ring = memory + args.query_buffers * args.rows * Arithmetic::kQueryRowBytes;
    Control& control = *reinterpret_cast<Control*>(ring + args.stages * kWarpgroups * kTileBytes);
    const Shared shared = {memory, ring, control};

    if (threadIdx.x < args.stages * kWarpgroups) {
        init_barrier(&control.full[threadIdx.x], kTileSlots >> args.log2_chunk);
        init_barrier(&control.empty[threadIdx.x], kWarpgroupThreads / 32);
    }
    if (threadIdx.x < args.query_buffers) {
        init_barrier(&control.query_full[threadIdx.x], 32);
        init_barrier(&control.query_empty[threadIdx.x], kConsumerThreads);
    }
    publish_barriers();
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const Share share = plan_share(args, control);  // also publishes the barriers to the block
    const int warp = threadIdx.x / 32;
    if (warp < kConsumerThreads / 32) {
        consume<Arithmetic, kHeads, kSingleRow>(args, shared, share);
    } else if (warp < kConsumerThreads / 32 + kWarpgroups) {
        produce(args, shared, share, warp - kConsumerThreads / 32);
    } else {
        bring_queries<Arithmetic, kHeads>(args, shared, share);
    }
}

}  // namespace spin::score
