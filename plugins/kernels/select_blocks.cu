// SPDX-License-Identifier: Apache-2.0
// spin_select_blocks: one thread block an entry; sets of blocks are bit words in shared memory.
#include <cfloat>

#include "choose.cuh"
#include "spin/advance.h"
#include "spin/select_blocks.h"
#include "status.h"

namespace spin {
namespace {

constexpr int kLeastThreads = 128, kFewThreads = 256, kManyThreads = 512;
constexpr int kMaxBlocks = kManyThreads * 32;
constexpr int64_t kPpm = 1000000;

// SPEC 6.
__host__ __device__ __forceinline__ uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

template <int kThreads>
struct Shared {
    ChooseScratch<kThreads> scratch;
    uint32_t candidates[kThreads], chosen[kThreads], ties[kThreads];
    uint32_t row[kThreads], mask[kThreads], explored[kThreads];
    uint32_t place[kThreads];  // kept blocks before each word
    uint32_t keys[1];          // [padded blocks], then priorities of the same length
};

struct Counts {
    int ranked, explored;
};

// Place of this entry's layer among those of the launch.
__device__ __forceinline__ uint32_t layer_index(const SpinSelectBlocksParams& p) {
    return blockIdx.x / static_cast<uint32_t>(p.layer_entries);
}

// SPEC 4, steps 4 to 7, for a row that sees `blocks` > 0 blocks. Any number may come as the target:
// below 0 keeps what 0 does, above 999999 what 999999 does.
__device__ __forceinline__ Counts budget(const SpinSelectBlocksParams& p, int32_t sparsity_ppm,
                                         int64_t blocks) {
    const int64_t fill = (static_cast<int64_t>(p.top_k) + p.block_size - 1) / p.block_size;
    const int64_t forced = min(blocks, int64_t{2});
    int64_t kept = min(blocks, max(fill, blocks - blocks * sparsity_ppm / kPpm));
    kept = max(kept, forced);
    const int64_t explored = min((kept * p.exploration_ppm + kPpm - 1) / kPpm, kept - forced);
    return {static_cast<int>(kept - explored - forced), static_cast<int>(explored)};
}

// Bits of the blocks 0 .. count - 1 that fall into word w.
__device__ __forceinline__ uint32_t leading_bits(int count, int w) {
    const int n = count - w * 32;
    return n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1u;
}

// Where a row keeps the score of a block: its own place, and where the next tile adds to it. Most
// blocks have only the first, and name it twice, so that loads need no branch.
struct ScorePlaces {
    int own, added;
};

__device__ __forceinline__ ScorePlaces score_places(int tile_blocks, int block, int last_tile) {
    if (tile_blocks == 0) {
        return {block, block};
    }
    const int tile = block >> (__ffs(tile_blocks) - 1), k = block & (tile_blocks - 1);
    const int width = tile_blocks + 2, own = tile * width + k + 2;
    // The next tile knows some offsets of this tile's last two blocks.
    const bool split = k >= tile_blocks - 2 && tile < last_tile;
    return {own, split ? (tile + 1) * width + k - (tile_blocks - 2) : own};
}

template <int kThreads>
__device__ __forceinline__ void write_mask(uint8_t* out, const uint32_t* words, int blocks) {
    for (int j = threadIdx.x; j < blocks; j += kThreads)
        out[j] = static_cast<uint8_t>(words[j >> 5] >> (j & 31) & 1u);
}

// The blocks that a warm row chooses: s.row, and what it explored in s.chosen.
template <int kThreads>
__device__ __forceinline__ void choose_row(const SpinSelectBlocksParams& p, Shared<kThreads>& s,
                                           uint32_t* priorities, int64_t e, int r, int present,
                                           int words, int last_tile) {
    const int t = threadIdx.x;
    const int32_t sparsity_ppm =  // read with the scores, so that nothing waits for it
        p.layer_sparsity_ppm != nullptr ? p.layer_sparsity_ppm[layer_index(p)] : p.sparsity_ppm;
    constexpr int kTogether = 4;  // loads that go out before the first is waited for
    const int64_t row_width =
        p.tile_blocks == 0 ? p.blocks : static_cast<int64_t>(p.tiles) * (p.tile_blocks + 2);
    const float* scores = p.block_scores + (e * p.rows + r) * row_width;
    for (int first = t; first < present; first += kTogether * kThreads) {
        float own[kTogether], added[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int block = min(first + i * kThreads, present - 1);
            const ScorePlaces at = score_places(p.tile_blocks, block, last_tile);
            own[i] = scores[at.own];
            added[i] = scores[at.added];
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int block = first + i * kThreads;
            if (block < present) {
                // Also lifts NaN to the lowest number: nothing ties with a block that is not there.
                s.keys[block] = ordered_key(fmaxf(fmaxf(own[i], added[i]), -FLT_MAX));
            }
        }
    }
    uint32_t forced = 0;
    if (t < words) {
        if (t == 0)
            forced |= 1u;
        if (t == (present - 1) >> 5)
            forced |= 1u << ((present - 1) & 31);
        s.candidates[t] = leading_bits(present, t) & ~forced;
    }
    __syncthreads();
    const Counts counts = budget(p, sparsity_ppm, present);
    const int free_blocks = max(present - 2, 0);
    choose_best(s.keys, s.candidates, words, free_blocks, counts.ranked, s.chosen, s.ties,
                s.scratch);
    if (t < words) {
        s.row[t] = forced | s.chosen[t];
        s.candidates[t] &= ~s.chosen[t];
    }
    __syncthreads();
    // Priorities are spread evenly over all 32 bits.
    choose_best(priorities, s.candidates, words, free_blocks - counts.ranked, counts.explored,
                s.chosen, s.ties, s.scratch, Range{0, 32});
    if (t < words)
        s.row[t] |= s.chosen[t];
}

// What the next spin_advance reads.
__device__ __forceinline__ void write_books(const SpinSelectBlocksParams& p, int64_t e,
                                            int64_t home, bool warm, const int64_t* positions) {
    const int t = threadIdx.x;
    if (home < p.lanes_total) {
        if (t < p.rows)
            p.lane_positions[home * p.rows + t] = positions[t];
        if (t == 0) {
            p.lane_waits[home] = 1;
            p.lane_warm[home] = warm;
            p.lane_next[home] = warm ? positions[0] : -1;
            if (p.tenants != nullptr)
                p.lane_tenant[home] =
                    p.tenants[static_cast<uint32_t>(e) % static_cast<uint32_t>(p.sequences)];
        }
    } else if (t == 0 && p.lanes != nullptr && positions[0] >= 0) {
        // It has outgrown its memory, unless it never had a lane.
        const int64_t lane = entry_lane(p.lanes, p.lane_stride, p.sequences, e);
        if (lane >= 0) {
            p.lane_waits[lane] = 0;
            p.lane_warm[lane] = 0;
        }
    }
}

// Lists and maps of the mask, and the books.
template <int kThreads>
__device__ __forceinline__ void write_entry(const SpinSelectBlocksParams& p, Shared<kThreads>& s,
                                            int64_t e, bool warm, const int64_t* positions,
                                            int last_row) {
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    uint32_t kept = 0;
    const uint32_t before = scan_block(__popc(s.mask[t]), s.scratch, &kept);
    s.place[t] = before;
    __syncthreads();
    int32_t* list = p.block_list + e * p.blocks;
    const int64_t home = p.places != nullptr ? p.places[e] : e;
    int32_t* compact = p.compact_of_block + home * p.blocks;
    for (int w = warp; w * 32 < p.blocks; w += kThreads / 32) {
        const int block = w * 32 + lane;
        const uint32_t word = s.mask[w];
        const int place = static_cast<int>(s.place[w] + __popc(word & ((1u << lane) - 1u)));
        const bool in = word >> lane & 1u;
        if (in)
            list[place] = block;
        if (block < p.blocks)
            compact[block] = in ? place : -1;
    }
    for (int j = static_cast<int>(kept) + t; j < p.blocks; j += kThreads)
        list[j] = -1;
    if (t < p.rows) {
        const int64_t capacity = static_cast<int64_t>(p.blocks) * p.block_size;
        const int64_t visible = min(visible_slots(positions[t], p.ratio), capacity);
        int64_t seen = 0;
        if (visible > 0) {
            const int newest = static_cast<int>(divide(visible - 1, p.block_size));
            const uint32_t word = s.mask[newest >> 5], bit = 1u << (newest & 31);
            seen = static_cast<int64_t>(s.place[newest >> 5] + __popc(word & (bit - 1u))) *
                   p.block_size;
            if (word & bit)
                seen += visible - static_cast<int64_t>(newest) * p.block_size;
        }
        p.row_slots[e * p.rows + t] = static_cast<int32_t>(seen);
        if (t == max(last_row, 0)) {
            p.kept_slots[e] = static_cast<int32_t>(seen);
            if (p.visible_slots != nullptr)
                p.visible_slots[e] = static_cast<int32_t>(visible);
        }
    }
    if (t == 0)
        p.block_count[e] = static_cast<int32_t>(kept);
    if (p.block_mask != nullptr)
        write_mask<kThreads>(p.block_mask + e * p.blocks, s.mask, p.blocks);
    if (p.explored_mask != nullptr)
        write_mask<kThreads>(p.explored_mask + e * p.blocks, s.explored, p.blocks);
    if (p.page_table != nullptr) {
        __syncthreads();  // the list is read back
        const int each = p.block_size / p.page_slots, shift = __ffs(each) - 1;
        const int64_t visible = last_row < 0 ? 0 : visible_slots(positions[last_row], p.ratio);
        const uint32_t sequence = blockIdx.x % static_cast<uint32_t>(p.sequences);
        const int32_t* table = p.page_table + sequence * p.page_table_stride;
        int32_t* out = p.compact_pages + e * p.compact_pages_stride;
        for (int64_t i = t; i < p.compact_pages_stride; i += kThreads) {
            int32_t page = 0;  // harmless: what a host puts where nothing is mapped
            if (i < static_cast<int64_t>(kept) * each) {
                const int64_t at = static_cast<int64_t>(list[i >> shift]) * each + (i & (each - 1));
                if (at < p.page_table_width && at * p.page_slots < visible)
                    page = table[at];
            }
            out[i] = page;
        }
    }
    if (p.places != nullptr)
        write_books(p, e, home, warm, positions);
}

// kBlocks: thread blocks a multiprocessor.
template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks - kFewerBlocks)
    select_entries(const SpinSelectBlocksParams p) {
    extern __shared__ uint4 memory[];
    Shared<kThreads>& s = *reinterpret_cast<Shared<kThreads>*>(memory);
    wait_for_inputs();
    const int t = threadIdx.x;
    const int64_t e = blockIdx.x;
    const uint32_t sequence = blockIdx.x % static_cast<uint32_t>(max(p.sequences, 1));
    uint32_t* priorities = s.keys + (p.blocks + 31) / 32 * 32;
    const int64_t* positions = p.positions + static_cast<int64_t>(sequence) * p.rows;
    const bool warm = p.warm[e] != 0;
    int last_row = -1;
    for (int r = 0; r < p.rows; ++r)
        if (positions[r] >= 0)
            last_row = r;
    s.mask[t] = 0;
    s.explored[t] = 0;
    const int64_t last_query = last_row < 0 ? 0 : query_slot(positions[last_row], p.ratio);
    const int last_tile =
        static_cast<int>(min(last_query / SPIN_ADVANCE_TILE_SLOTS, int64_t{p.tiles} - 1));
    if (warm && p.exploration_ppm > 0) {
        const uint64_t layer =
            static_cast<uint64_t>(p.layers != nullptr ? p.layers[layer_index(p)] : p.layer);
        const uint64_t id = static_cast<uint64_t>(p.sequence_ids[sequence]);
        const uint64_t key =
            mix(mix(mix(p.seed) ^ id) ^ (layer << 40) ^ static_cast<uint64_t>(positions[0]));
        // Inverted: the smallest priority is the best key.
        for (int j = t; j < p.blocks; j += kThreads)
            priorities[j] = ~static_cast<uint32_t>(mix(key ^ static_cast<uint64_t>(j)) >> 32);
    }
    int newest = -1;
    for (int r = 0; r < p.rows; ++r) {
        const int64_t seen =
            divide(visible_slots(positions[r], p.ratio) + p.block_size - 1, p.block_size);
        const int present = static_cast<int>(min(seen, int64_t{p.blocks}));
        const int words = (present + 31) / 32;
        newest = max(newest, present - 1);
        s.row[t] = leading_bits(present, t);
        s.chosen[t] = 0;
        __syncthreads();
        if (warm && present > 0)
            choose_row(p, s, priorities, e, r, present, words, last_tile);
        // Words are the thread's own from here to the next choose_row.
        const bool counts = !p.row0_mask || r == 0;
        if (counts)
            s.mask[t] |= s.row[t];
        if (counts && warm && t < words)
            s.explored[t] |= s.chosen[t];
        if (p.row_masks != nullptr) {
            __syncthreads();
            write_mask<kThreads>(p.row_masks + (e * p.rows + r) * p.blocks, s.row, p.blocks);
        }
        __syncthreads();
    }
    if (p.row0_mask && newest >= 0 && t == newest >> 5)
        s.mask[t] |= 1u << (newest & 31);
    __syncthreads();
    write_entry(p, s, e, warm, positions, last_row);
}

}  // namespace
}  // namespace spin

extern "C" int spin_select_blocks(const SpinSelectBlocksParams* p, cudaStream_t stream) {
    using namespace spin;
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, entries, 0, kMaxEntries);
    if (p->entries == 0)
        return SPIN_OK;
    SPIN_CHECK_POINTER(p, block_scores, 4);
    SPIN_CHECK_POINTER(p, positions, 8);
    SPIN_CHECK_POINTER(p, warm, 1);
    SPIN_CHECK_POINTER(p, sequence_ids, 8);
    SPIN_CHECK_POINTER(p, block_list, 4);
    SPIN_CHECK_POINTER(p, block_count, 4);
    SPIN_CHECK_POINTER(p, kept_slots, 4);
    SPIN_CHECK_POINTER(p, row_slots, 4);
    SPIN_CHECK_POINTER(p, compact_of_block, 4);
    SPIN_CHECK_RANGE(p, rows, 1, kMaxRows);
    SPIN_CHECK_RANGE(p, blocks, 1, kMaxBlocks);
    SPIN_CHECK_RANGE(p, ratio, 1, 1 << 20);
    SPIN_CHECK_RANGE(p, top_k, 1, INT32_MAX);
    SPIN_CHECK_RANGE(p, sparsity_ppm, 0, kPpm - 1);
    SPIN_CHECK_RANGE(p, exploration_ppm, 0, kPpm);
    SPIN_CHECK(is_block_size(p->block_size), SPIN_ERROR_UNSUPPORTED, "block_size",
               "8, 16, 32, 64, 128");
    SPIN_CHECK(p->tile_blocks == 0 || p->tile_blocks == SPIN_ADVANCE_TILE_SLOTS / p->block_size,
               SPIN_ERROR_RANGE, "tile_blocks", "0 or SPIN_ADVANCE_TILE_SLOTS / block_size");
    SPIN_CHECK(p->tile_blocks == 0 || static_cast<int64_t>(p->tiles) * p->tile_blocks >= p->blocks,
               SPIN_ERROR_RANGE, "tiles", "enough for blocks");
    SPIN_CHECK(p->sequences >= 1 && p->entries % p->sequences == 0, SPIN_ERROR_RANGE, "sequences",
               "a divisor of entries");
    SPIN_CHECK_RANGE(p, layer_entries, 1, kMaxEntries);
    if (p->layers == nullptr) {
        SPIN_CHECK(p->layer_entries == p->entries, SPIN_ERROR_NULL, "layers",
                   "null only where layer_entries are all entries");
        SPIN_CHECK_RANGE(p, layer, 0, INT32_MAX);
    } else {
        SPIN_CHECK_POINTER(p, layers, 8);
    }
    if (p->layer_sparsity_ppm != nullptr)
        SPIN_CHECK_POINTER(p, layer_sparsity_ppm, 4);
    if (p->page_table != nullptr) {
        SPIN_CHECK_POINTER(p, page_table, 4);
        SPIN_CHECK_POINTER(p, compact_pages, 4);
        SPIN_CHECK(p->page_slots == 32 || p->page_slots == 64, SPIN_ERROR_UNSUPPORTED, "page_slots",
                   "32, 64");
        SPIN_CHECK(p->block_size >= p->page_slots, SPIN_ERROR_UNSUPPORTED, "page_slots",
                   "at most block_size: smaller blocks cannot be listed as pages");
        SPIN_CHECK(p->page_table_width >= 0 && p->page_table_stride >= p->page_table_width,
                   SPIN_ERROR_RANGE, "page_table_width", "0 .. page_table_stride");
        SPIN_CHECK_RANGE(p, compact_pages_stride, 0, kMaxSlots);
    }
    if (p->places != nullptr) {
        SPIN_CHECK_POINTER(p, places, 8);
        SPIN_CHECK_POINTER(p, lane_positions, 8);
        SPIN_CHECK_POINTER(p, lane_waits, 1);
        SPIN_CHECK_POINTER(p, lane_warm, 1);
        SPIN_CHECK_POINTER(p, lane_next, 8);
        if (p->lanes != nullptr) {
            SPIN_CHECK_POINTER(p, lanes, 8);
            SPIN_CHECK_LANES(p);
        }
        if (p->tenants != nullptr) {
            SPIN_CHECK_POINTER(p, tenants, 8);
            SPIN_CHECK_POINTER(p, lane_tenant, 8);
        }
    }
    const size_t padded = static_cast<size_t>(p->blocks + 31) / 32 * 32;
    const size_t keys = 2 * padded * sizeof(uint32_t);
    const dim3 blocks(static_cast<unsigned>(p->entries));
    // Many entries: what counts is how many are under way, not how long one takes.
    if (p->blocks <= kLeastThreads * 32 && p->entries > 1024)
        return launch(select_entries<kLeastThreads, 10>, blocks, kLeastThreads,
                      sizeof(Shared<kLeastThreads>) + keys, 1, stream, *p);
    if (p->blocks <= kFewThreads * 32)
        return launch(select_entries<kFewThreads, 4>, blocks, kFewThreads,
                      sizeof(Shared<kFewThreads>) + keys, 1, stream, *p);
    const size_t shared_bytes = sizeof(Shared<kManyThreads>) + keys;
    Device device = {};
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess)
        return launched(error);
    SPIN_CHECK(shared_bytes <= static_cast<size_t>(device.shared_bytes), SPIN_ERROR_UNSUPPORTED,
               "blocks", "fewer, as this GPU's shared memory is small; take a larger block_size");
    return launch(select_entries<kManyThreads, 2>, blocks, kManyThreads, shared_bytes, 1, stream,
                  *p);
}
