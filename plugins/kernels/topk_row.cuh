// SPDX-License-Identifier: Apache-2.0
// What spin_topk_slots does with one row: reading it, bounding its best scores, choosing.
#pragma once

#include <cooperative_groups.h>

#include "choose.cuh"
#include "spin/topk_slots.h"

namespace spin {

constexpr int kSampleEach = 8;        // scores of the sample a thread, in pieces of four neighbours
constexpr int kMaxBufferSize = 8192;  // marked scores that one block can choose from
constexpr int kMaxCluster = 8;        // the largest that every GPU grants

struct TopkArgs {
    SpinTopkSlotsParams p;
    int32_t block_shift;
    int32_t buffer_size;  // a multiple of 32, at most kMaxBufferSize
    int32_t mark_words;   // marks of one block, capacity
};

template <int kThreads>
struct TopkShared {
    ChooseScratch<kThreads> scratch;
    uint32_t marked[kMaxCluster];    // scores that each block of the cluster marked
    uint32_t highest;                // key of the best marked score of the row
    uint32_t strictly[kMaxCluster];  // descent: scores above the threshold in each block
    uint32_t level[kMaxCluster];     // descent: scores at the threshold in each block
    uint32_t candidates[kMaxBufferSize / 32], chosen[kMaxBufferSize / 32];
    uint32_t ties[kMaxBufferSize / 32];
    // followed by keys [buffer_size], slots [buffer_size], marks [mark_words], levels
    // [mark_words]
};

struct Row {
    const float* scores;
    const int32_t* list;  // null: columns are slots
    int length;
    int block_shift;
    bool full;

    __device__ __forceinline__ int slot(int column) const {
        if (list == nullptr) {
            return column;
        }
        return (list[column >> block_shift] << block_shift) + (column & ((1 << block_shift) - 1));
    }
    // Where a column's score lies; contiguous within a group of eight columns.
    __device__ __forceinline__ const float* at(int column) const {
        return scores + (full ? slot(column) : column);
    }
    __device__ __forceinline__ void load_group(int group, float (&z)[kGroup]) const {
        const float4* from = reinterpret_cast<const float4*>(at(group * kGroup));
        const float4 low = from[0], high = from[1];
        z[0] = low.x, z[1] = low.y, z[2] = low.z, z[3] = low.w;
        z[4] = high.x, z[5] = high.y, z[6] = high.z, z[7] = high.w;
    }
    // Bits of a group's columns that the row really has.
    __device__ __forceinline__ uint32_t valid_bits(int group) const {
        const int n = length - group * kGroup;
        return n >= kGroup ? 0xffu : (1u << n) - 1u;
    }
};

// Evenly spread scores of a row: the first `pieces` of `z` a thread.
template <int kThreads>
__device__ __forceinline__ void load_sample(const Row& row, int pieces,
                                            float4 (&z)[kSampleEach / 4]) {
    const uint64_t all = static_cast<uint64_t>(row.length / 4);
#pragma unroll
    for (int i = 0; i < kSampleEach / 4; ++i) {
        if (i < pieces) {
            const uint64_t index = threadIdx.x + i * kThreads;
            const int piece = static_cast<int>(index * all / (pieces * kThreads));
            z[i] = *reinterpret_cast<const float4*>(row.at(piece * 4));
        }
    }
}

// A score such that about `rank` of the sample lie at or above it; -inf if none is usable.
template <int kThreads>
__device__ __forceinline__ float sample_bound(const float4 (&z)[kSampleEach / 4], int pieces,
                                              uint32_t rank, ChooseScratch<kThreads>& s) {
    constexpr int kEach = kSampleEach;
    uint32_t keys[kEach];
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
        keys[4 * i] = ordered_key(z[i].x);
        keys[4 * i + 1] = ordered_key(z[i].y);
        keys[4 * i + 2] = ordered_key(z[i].z);
        keys[4 * i + 3] = ordered_key(z[i].w);
    }
    const int each = pieces * 4;
    uint32_t low = 0xffffffffu, high = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        if (i < each) {
            low = min(low, keys[i]);
            high = max(high, keys[i]);
        }
    }
    clear_bins(s);
    reduce_range(low, high, s);
    Range range = Range::of(low, high);
    uint32_t left = rank;
    while (true) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (i < each && range.has(keys[i])) {
                atomicAdd(&s.bins[range.digit(keys[i])], 1u);
            }
        }
        __syncthreads();
        find_bin(left, s, [&](int place) {
            Bins<kThreads> bins;
            bins.load(s.bins, place);
            return bins;
        });
        range = range.at(s.digit);
        // The low end of a small bin is near enough.
        if (range.bits == 0 || (s.count - s.left) * 8 <= rank) {
            break;
        }
        left = s.left;
        clear_bins(s);
        __syncthreads();
    }
    return range.base > kKeyOfMinusInfinity ? float_of_key(range.base) : minus_infinity();
}

// Writes the columns of the set bits to `out`, ascending, if they fit; returns how many there are.
template <int kThreads>
__device__ __forceinline__ uint32_t list_marks(const uint32_t* marks, int words, int first_column,
                                               uint32_t* out, uint32_t capacity,
                                               ChooseScratch<kThreads>& s) {
    const int each = (words + kThreads - 1) / kThreads;
    const int first = threadIdx.x * each, end = min(first + each, words);
    uint32_t count = 0, total = 0;
    for (int w = first; w < end; ++w) {
        count += __popc(marks[w]);
    }
    uint32_t place = scan_block(count, s, &total);
    if (total <= capacity) {
        for (int w = first; w < end; ++w) {
            for (uint32_t word = marks[w]; word != 0; word &= word - 1) {
                out[place++] = static_cast<uint32_t>(first_column + w * 32 + __ffs(word) - 1);
            }
        }
    }
    __syncthreads();
    return total;
}

// Chooses k of the `count` keys in shared memory and writes their slots.
template <int kThreads>
__device__ __forceinline__ void finish_row(TopkShared<kThreads>& s, const uint32_t* keys,
                                           const uint32_t* slots, int count, int k, int top_k,
                                           int32_t* out, Range known = Range{0, -1}) {
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31, words = (count + 31) / 32;
    if (t < words) {
        const int n = count - t * 32;
        s.candidates[t] = n >= 32 ? 0xffffffffu : (1u << n) - 1u;
    }
    __syncthreads();
    choose_best(keys, s.candidates, words, count, k, s.chosen, s.ties, s.scratch, known);
    for (int w = warp; w < words; w += kThreads / 32) {
        // Every warp counts what lies before its words: quicker than to wait for each other.
        uint32_t before = 0;
        for (int i = lane; i < w; i += 32) {
            before += __popc(s.chosen[i]);
        }
        before = __reduce_add_sync(kAllLanes, before);
        const uint32_t word = s.chosen[w];
        if (word >> lane & 1u) {
            out[before + __popc(word & ((1u << lane) - 1u))] =
                static_cast<int32_t>(slots[w * 32 + lane]);
        }
    }
    for (int i = k + t; i < top_k; i += kThreads) {
        out[i] = -1;
    }
}

// The exact way for rows on which the sample's bound did not work out: a radix descent of the whole
// cluster over the row. Every block ends up writing its own part of the result.
template <int kThreads>
__device__ __noinline__ void descend(const Row& row, TopkShared<kThreads>& s, uint32_t* marks,
                                     uint32_t* levels, int first_group, int end_group, int k,
                                     int32_t* out) {
    namespace cg = cooperative_groups;
    cg::cluster_group cluster = cg::this_cluster();
    const int t = threadIdx.x, blocks = static_cast<int>(cluster.num_blocks());
    const int rank = static_cast<int>(cluster.block_rank());
    Range range = {0, 32};
    uint32_t left = static_cast<uint32_t>(k);
    while (range.bits > 0) {
        clear_bins(s.scratch);
        __syncthreads();
        for (int g = first_group + t; g < end_group; g += kThreads) {
            float z[kGroup];
            row.load_group(g, z);
            const uint32_t valid = row.valid_bits(g);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                const uint32_t key = ordered_key(z[j]);
                if ((valid >> j & 1u) && range.has(key)) {
                    atomicAdd(&s.scratch.bins[range.digit(key)], 1u);
                }
            }
        }
        cluster.sync();
        find_bin(left, s.scratch, [&](int place) {
            Bins<kThreads> sum, bins;
            sum.load(s.scratch.bins, place);
            for (int b = 1; b < blocks; ++b) {
                bins.load(cluster.map_shared_rank(s.scratch.bins, (rank + b) % blocks), place);
                sum.add(bins);
            }
            return sum;
        });
        range = range.at(s.scratch.digit);
        left = s.scratch.left;
        cluster.sync();  // all have read the bins
    }
    const int words = (end_group - first_group + 3) / 4;
    uint8_t* mark_bytes = reinterpret_cast<uint8_t*>(marks);
    uint8_t* level_bytes = reinterpret_cast<uint8_t*>(levels);
    for (int i = t; i < 4 * words; i += kThreads) {
        uint32_t above = 0, level = 0;
        const int g = first_group + i;
        if (g < end_group) {
            float z[kGroup];
            row.load_group(g, z);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                const uint32_t key = ordered_key(z[j]);
                above |= static_cast<uint32_t>(key > range.base) << j;
                level |= static_cast<uint32_t>(key == range.base) << j;
            }
            above &= row.valid_bits(g);
            level &= row.valid_bits(g);
        }
        mark_bytes[i] = static_cast<uint8_t>(above);
        level_bytes[i] = static_cast<uint8_t>(level);
    }
    __syncthreads();
    const int each = (words + kThreads - 1) / kThreads;
    const int first = t * each, end = min(first + each, words);
    uint32_t above = 0, level = 0, total_above = 0, total_level = 0;
    for (int w = first; w < end; ++w) {
        above += __popc(marks[w]);
        level += __popc(levels[w]);
    }
    uint32_t above_before = scan_block(above, s.scratch, &total_above);
    uint32_t level_before = scan_block(level, s.scratch, &total_level);
    if (t < blocks) {
        cluster.map_shared_rank(s.strictly, t)[rank] = total_above;
        cluster.map_shared_rank(s.level, t)[rank] = total_level;
    }
    cluster.sync();
    for (int b = 0; b < rank; ++b) {
        above_before += s.strictly[b];
        level_before += s.level[b];
    }
    // Of the scores at the threshold the first `left` of the row are taken.
    uint32_t place = above_before + min(level_before, left);
    for (int w = first; w < end; ++w) {
        const uint32_t here = levels[w];
        const uint32_t take = lowest_bits(here, static_cast<int>(left - min(level_before, left)));
        level_before += __popc(here);
        for (uint32_t word = marks[w] | take; word != 0; word &= word - 1) {
            out[place++] = row.slot(first_group * kGroup + w * 32 + __ffs(word) - 1);
        }
    }
}

}  // namespace spin
