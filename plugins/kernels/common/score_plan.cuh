// SPDX-License-Identifier: Apache-2.0
//
// Who scores what: the arguments of the score_slots kernel and the split of all work over its
// thread blocks, from lengths and counts that only the device knows.

#pragma once

#include <cstdint>

namespace spin::score {

// A tile is 64 columns of one sequence's compact output. It is copied as 2 or 4 chunks: the largest
// runs of slots, up to half a tile, that are sure to lie in one block and one page.
constexpr int kLog2TileSlots = 6;
constexpr int kTileSlots = 1 << kLog2TileSlots;
constexpr int kHalfSlots = kTileSlots / 2;
constexpr int kMinChunkSlots = 16;
constexpr int kMaxChunks = kTileSlots / kMinChunkSlots;
constexpr int kKeyBytes = 128;
constexpr int kScaleBytes = 4;

// A tile in shared memory: the keys of one half, of the other half, then all scales. A row of keys
// covers all 32 banks, so rows can only be read side by side without conflict if some start at
// another bank: the second half is shifted by half a row.
constexpr int kHalfBytes = kHalfSlots * kKeyBytes;
constexpr int kSecondHalf = kHalfBytes + kKeyBytes / 2;
constexpr int kScales = kSecondHalf + kHalfBytes;
constexpr int kTileBytes = (kScales + kTileSlots * kScaleBytes + 127) / 128 * 128;

constexpr int kMaxRows = 8;
constexpr int kMaxHeads = 64;
constexpr int kMaxSequences = 1024;  // of one launch; the host splits larger batches
constexpr int kMinStages = 2;        // of each warpgroup
constexpr int kMaxQueryBuffers = 2;
constexpr int kMaxStages = 12;

constexpr int kWarpgroups = 3;
constexpr int kWarpgroupThreads = 128;
constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads;
constexpr int kThreads = kConsumerThreads + kWarpgroups * 32 + 32;  // and the query warp

struct ScoreArgs {
    const uint8_t* query;
    const float* weights;
    const uint8_t* pages;
    const int32_t* page_table;
    const int32_t* visible_slots;
    const int32_t* block_list;  // null: every block is kept
    const int32_t* block_count;
    const int64_t* places;  // null: sequences are in order
    float* scores;
    int64_t num_pages;
    int64_t page_table_stride;
    int64_t block_list_stride;
    int64_t score_stride;
    int32_t sequences;
    int32_t rows_per_sequence;
    int32_t rows;  // of this launch: query and scores start at its first row
    int32_t max_slots;
    int32_t max_blocks;
    int32_t log2_page;
    int32_t log2_block;
    int32_t log2_chunk;
    int32_t stages;  // of each warpgroup
    int32_t query_buffers;
};

// Shared memory beside the queries and the ring of tiles.
struct Control {
    uint64_t full[kMaxStages];
    uint64_t empty[kMaxStages];
    uint64_t query_full[kMaxQueryBuffers];
    uint64_t query_empty[kMaxQueryBuffers];
    int32_t visible_slots[kMaxStages][kMaxChunks];  // of each chunk
    int32_t warp_tiles[32];
    int32_t first_tile[kMaxSequences + 1];  // the first tile of a sequence, counting them all
    int64_t places[kMaxQueryBuffers];       // where the scores of a query go
    alignas(16) float weights[kMaxQueryBuffers][kMaxRows * kMaxHeads];
};

// This thread block's share: tiles [begin, end), of which the first belongs to `sequence`.
struct Share {
    int begin;
    int end;
    int sequence;
    int stages;  // of the ring to use, for each warpgroup
};

__device__ __forceinline__ int visible_slots(const ScoreArgs& args, int sequence) {
    return max(0, min(args.visible_slots[sequence], args.max_slots));
}

__device__ __forceinline__ int kept_blocks(const ScoreArgs& args, int sequence) {
    return max(0, min(args.block_count[sequence], args.max_blocks));
}

__device__ __forceinline__ int count_tiles(const ScoreArgs& args, int sequence) {
    int columns = visible_slots(args, sequence);
    if (args.block_list != nullptr) {
        const int listed = kept_blocks(args, sequence) << args.log2_block;
        columns = columns > 0 ? listed : 0;
    }
    return (columns + kTileSlots - 1) / kTileSlots;
}

// Fills control.first_tile by a prefix sum over the batch and takes an equal share of all tiles.
// All threads of the block call it; every block comes to the same sums.
__device__ __forceinline__ Share plan_share(const ScoreArgs& args, Control& control) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        control.first_tile[0] = 0;
    }
    int total = 0;
    for (int base = 0; base < args.sequences; base += kThreads) {
        const int sequence = base + threadIdx.x;
        int sum = sequence < args.sequences ? count_tiles(args, sequence) : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(~0u, sum, distance);
            sum += lane >= distance ? other : 0;
        }
        if (lane == 31) {
            control.warp_tiles[warp] = sum;
        }
        __syncthreads();
        int before = total;
        for (int other = 0; other < kThreads / 32; ++other) {
            const int tiles = control.warp_tiles[other];
            before += other < warp ? tiles : 0;
            total += tiles;
        }
        if (sequence < args.sequences) {
            control.first_tile[sequence + 1] = before + sum;
        }
        __syncthreads();
    }

    Share share;
    share.begin = static_cast<int>(int64_t{total} * blockIdx.x / gridDim.x);
    share.end = static_cast<int>(int64_t{total} * (blockIdx.x + 1) / gridDim.x);
    // In a long share a deep ring evens out the memory's latency. In a short one it would have all
    // multiprocessors receive all of their first tiles late, instead of some of them early.
    const int tiles_each = (share.end - share.begin) / kWarpgroups;
    share.stages = max(kMinStages, min(args.stages, tiles_each / 32));
    // The first sequence that ends after the share begins.
    int low = 0, high = args.sequences - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (control.first_tile[middle + 1] > share.begin) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    share.sequence = low;
    return share;
}

}  // namespace spin::score
