// SPDX-License-Identifier: Apache-2.0
// spin_adopt_scores: a copy of the scores and a map of the columns, in one launch.
#include "device.cuh"
#include "spin/adopt_scores.h"
#include "status.h"

namespace spin {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 2;  // of four scores, in flight in a thread
constexpr int kChunk = kThreads * kVectors * 4;

__device__ __forceinline__ void map_columns(const SpinAdoptScoresParams& p, int shift, int64_t row,
                                            int64_t entry) {
    const int32_t* list = p.block_list + entry * p.blocks;
    int32_t* columns = p.columns + row * p.top_k;
    for (int i = threadIdx.x; i < p.top_k; i += kThreads) {
        const int column = columns[i];
        const int place = column >> shift;
        const int block = column >= 0 && place < p.blocks ? list[place] : -1;
        columns[i] = block < 0 ? -1 : (block << shift) + (column & ((1 << shift) - 1));
    }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) adopt(const SpinAdoptScoresParams p, int shift) {
    wait_for_inputs();
    const int64_t row = blockIdx.x;
    const int64_t entry = row / p.host_rows, r = row % p.host_rows;
    if (blockIdx.y == 0 && p.columns != nullptr) {
        map_columns(p, shift, row, entry);
    }
    const int seen = min(p.row_slots[entry * p.rows + r], min(p.host_columns, p.blocks << shift));
    const int first = static_cast<int>(blockIdx.y) * kChunk;
    if (first >= seen) {
        return;
    }
    const float* from = p.host_scores + row * p.host_stride;
    float* to = p.scores + (p.places[entry] * p.rows + r) * p.score_stride;
    if constexpr (kAligned) {
        // The last vector may reach past `seen`, never past either row.
        float4 held[kVectors];
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
            const int i = first + (n * kThreads + static_cast<int>(threadIdx.x)) * 4;
            if (i < seen) {
                held[n] = __ldcs(reinterpret_cast<const float4*>(from + i));
            }
        }
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
            const int i = first + (n * kThreads + static_cast<int>(threadIdx.x)) * 4;
            if (i < seen) {
                *reinterpret_cast<float4*>(to + i) = held[n];
            }
        }
    } else {
        for (int i = first + static_cast<int>(threadIdx.x); i < min(first + kChunk, seen);
             i += kThreads) {
            to[i] = from[i];
        }
    }
}

}  // namespace
}  // namespace spin

extern "C" int spin_adopt_scores(const SpinAdoptScoresParams* p, cudaStream_t stream) {
    using namespace spin;
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, entries, 0, kMaxEntries);
    if (p->entries == 0) {
        return SPIN_OK;
    }
    SPIN_CHECK_POINTER(p, host_scores, 4);
    SPIN_CHECK_POINTER(p, block_list, 4);
    SPIN_CHECK_POINTER(p, row_slots, 4);
    SPIN_CHECK_POINTER(p, places, 8);
    SPIN_CHECK_POINTER(p, scores, 16);
    SPIN_CHECK_RANGE(p, rows, 1, kMaxRows);
    SPIN_CHECK_RANGE(p, host_rows, 1, p->rows);
    SPIN_CHECK_RANGE(p, host_columns, 0, p->host_stride);
    SPIN_CHECK(is_block_size(p->block_size), SPIN_ERROR_UNSUPPORTED, "block_size",
               "8, 16, 32, 64, 128");
    SPIN_CHECK_RANGE(p, blocks, 1, kMaxSlots / p->block_size);
    const int64_t capacity = static_cast<int64_t>(p->blocks) * p->block_size;
    SPIN_CHECK(p->score_stride % 8 == 0 && p->score_stride >= capacity, SPIN_ERROR_ALIGNMENT,
               "score_stride", "a multiple of 8, at least blocks * block_size");
    if (p->columns != nullptr) {
        SPIN_CHECK_POINTER(p, columns, 4);
        SPIN_CHECK_RANGE(p, top_k, 1, INT32_MAX);
    }
    const int64_t most = p->host_columns < capacity ? p->host_columns : capacity;
    const int64_t chunks = (most + kChunk - 1) / kChunk;
    const dim3 grid(static_cast<unsigned>(p->entries * p->host_rows),
                    static_cast<unsigned>(chunks < 1 ? 1 : chunks));
    const bool vectors = aligned(p->host_scores, 16) && p->host_stride % 4 == 0;
    const int shift = __builtin_ctz(static_cast<unsigned>(p->block_size));
    return launch(vectors ? adopt<true> : adopt<false>, grid, kThreads, 0, 1, stream, *p, shift);
}
