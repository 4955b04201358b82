// SPDX-License-Identifier: Apache-2.0
// spin_topk_slots: a cluster of thread blocks a row.
//
// Short rows: the first block of the cluster holds the whole row in shared memory and chooses.
// Long rows: a sample of the row gives a bound that the k-th best score very likely exceeds by a
// little, one pass over the row marks every score at or above it, and the first block chooses among
// those. The bound only decides how many are marked: if they are fewer than k, or more than fit
// (a plateau of equal scores, say), the cluster finds the exact threshold by a radix descent over
// the row instead. Marks are bits in slot order, so the result is ordered and the same every time.
#include <cooperative_groups.h>

#include "choose.cuh"
#include "spin/topk_slots.h"
#include "status.h"

namespace spin {
namespace {

namespace cg = cooperative_groups;

constexpr int kSampleSize = 4096;  // in pieces of four neighbours
constexpr int kMaxTopK = 2048;
constexpr int kMaxBufferSize = 8192;   // marked scores that the first block can choose from
constexpr int kMaxCluster = 8;         // the largest that every GPU grants
constexpr int kMarkBytes = 48 * 1024;  // shared memory for one block's marks

struct Args {
    SpinTopkSlotsParams p;
    int32_t block_shift;
    int32_t buffer_size;  // a multiple of 32, at most kMaxBufferSize
    int32_t mark_words;   // marks of one block, capacity
};

struct Shared {
    ChooseScratch scratch;
    uint32_t marked;    // scores this block marked
    uint32_t strictly;  // descent: scores above the threshold in this block
    uint32_t level;     // descent: scores at the threshold in this block
    uint32_t candidates[kMaxBufferSize / 32], chosen[kMaxBufferSize / 32];
    uint32_t ties[kMaxBufferSize / 32];
    // followed by keys [buffer_size], columns [buffer_size], marks [mark_words], levels
    // [mark_words]
};

struct Row {
    const float* scores;
    const int32_t* list;  // null: columns are slots
    int64_t length;
    int32_t block_shift;
    bool full;

    __device__ int64_t slot(int64_t column) const {
        if (list == nullptr)
            return column;
        const int64_t block = list[column >> block_shift];
        return (block << block_shift) + (column & ((1 << block_shift) - 1));
    }
    // Where a column's score lies; contiguous within a group of eight columns.
    __device__ const float* at(int64_t column) const {
        return scores + (full ? slot(column) : column);
    }
};

// Eight scores of a group; those past the row's end are -inf and must be masked by the caller.
__device__ __forceinline__ void load_group(const Row& row, int64_t group, float (&z)[kGroup]) {
    const int64_t column = group * kGroup;
    const float4* from = reinterpret_cast<const float4*>(row.at(column));
    const float4 low = from[0], high = from[1];
    z[0] = low.x, z[1] = low.y, z[2] = low.z, z[3] = low.w;
    z[4] = high.x, z[5] = high.y, z[6] = high.z, z[7] = high.w;
}

__device__ __forceinline__ uint32_t valid_bits(int64_t length, int64_t group) {
    const int64_t n = length - group * kGroup;
    return n >= kGroup ? 0xffu : (1u << n) - 1u;
}

// A key near which about `rank` of the sample lie at or above; low bits are zero.
__device__ uint32_t sample_bound(const Row& row, uint32_t rank, ChooseScratch& s) {
    constexpr int kEach = kSampleSize / kChooseThreads;
    uint32_t keys[kEach];
    const int64_t pieces = row.length / 4;
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
        const int64_t index = static_cast<int64_t>(threadIdx.x) * (kEach / 4) + i;
        const int64_t piece = index * pieces / (kSampleSize / 4);
        const float4 z = *reinterpret_cast<const float4*>(row.at(piece * 4));
        keys[4 * i] = ordered_key(z.x), keys[4 * i + 1] = ordered_key(z.y);
        keys[4 * i + 2] = ordered_key(z.z), keys[4 * i + 3] = ordered_key(z.w);
    }
    uint32_t prefix = 0, mask = 0;
    for (int pass = 0; pass < 2; ++pass) {
        const int shift = digit_shift(pass);
        clear_bins(s);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if ((keys[i] & mask) == prefix)
                atomicAdd(&s.bins[keys[i] >> shift & digit_mask(pass)], 1u);
        __syncthreads();
        find_bin(rank, s, [&](int i) { return reinterpret_cast<const uint4*>(s.bins)[i]; });
        prefix |= s.digit << shift;
        mask |= digit_mask(pass) << shift;
        rank = s.left;
        __syncthreads();
    }
    return prefix;
}

// Writes the columns of the set bits to `out`, ascending; returns how many there are.
__device__ uint32_t list_marks(const uint32_t* marks, int words, int64_t first_column,
                               uint32_t* out, uint32_t capacity, ChooseScratch& s) {
    const int each = (words + kChooseThreads - 1) / kChooseThreads;
    const int first = threadIdx.x * each, end = min(first + each, words);
    uint32_t count = 0, total = 0;
    for (int w = first; w < end; ++w)
        count += __popc(marks[w]);
    uint32_t place = scan_block(count, s, &total);
    if (total <= capacity) {
        for (int w = first; w < end; ++w)
            for (uint32_t word = marks[w]; word != 0; word &= word - 1)
                out[place++] = static_cast<uint32_t>(first_column) + w * 32 + __ffs(word) - 1;
    }
    __syncthreads();
    return total;
}

// Chooses k of the `count` keys in shared memory and writes their slots.
__device__ void finish(const Args& a, const Row& row, Shared& s, const uint32_t* keys,
                       const uint32_t* columns, int count, int k, int32_t* out) {
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31, words = (count + 31) / 32;
    if (t < words) {
        const int n = count - t * 32;
        s.candidates[t] = n >= 32 ? 0xffffffffu : (1u << n) - 1u;
    }
    __syncthreads();
    choose_best(keys, s.candidates, words, count, k, s.chosen, s.ties, s.scratch);
    const uint32_t before = scan_block(t < words ? __popc(s.chosen[t]) : 0u, s.scratch);
    if (t < words)
        s.ties[t] = before;
    __syncthreads();
    for (int w = warp; w < words; w += kChooseWarps) {
        const uint32_t word = s.chosen[w];
        if (word >> lane & 1u) {
            const uint32_t place = s.ties[w] + __popc(word & ((1u << lane) - 1u));
            out[place] = static_cast<int32_t>(row.slot(columns[w * 32 + lane]));
        }
    }
    for (int i = k + t; i < a.p.top_k; i += kChooseThreads)
        out[i] = -1;
}

// The exact way for rows on which the sample's bound did not work out. Every block of the cluster
// ends up writing its own part of the result.
__device__ void descend(const Args& a, const Row& row, Shared& s, uint32_t* marks, uint32_t* levels,
                        int64_t first_group, int64_t end_group, int k, int32_t* out) {
    cg::cluster_group cluster = cg::this_cluster();
    const int t = threadIdx.x, blocks = static_cast<int>(cluster.num_blocks());
    uint32_t prefix = 0, mask = 0, left = static_cast<uint32_t>(k);
    for (int pass = 0; pass < kDigits; ++pass) {
        const int shift = digit_shift(pass);
        clear_bins(s.scratch);
        __syncthreads();
        for (int64_t g = first_group + t; g < end_group; g += kChooseThreads) {
            float z[kGroup];
            load_group(row, g, z);
            const uint32_t valid = valid_bits(row.length, g);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                const uint32_t key = ordered_key(z[j]);
                if ((valid >> j & 1u) && (key & mask) == prefix)
                    atomicAdd(&s.scratch.bins[key >> shift & digit_mask(pass)], 1u);
            }
        }
        cluster.sync();
        find_bin(left, s.scratch, [&](int i) {
            uint4 sum = make_uint4(0, 0, 0, 0);
            for (int b = 0; b < blocks; ++b) {
                const uint32_t* bins = cluster.map_shared_rank(s.scratch.bins, b);
                const uint4 c = reinterpret_cast<const uint4*>(bins)[i];
                sum.x += c.x, sum.y += c.y, sum.z += c.z, sum.w += c.w;
            }
            return sum;
        });
        prefix |= s.scratch.digit << shift;
        mask |= digit_mask(pass) << shift;
        left = s.scratch.left;
        cluster.sync();  // all have read the bins
    }
    const int words = static_cast<int>((end_group - first_group + 3) / 4);
    uint8_t* mark_bytes = reinterpret_cast<uint8_t*>(marks);
    uint8_t* level_bytes = reinterpret_cast<uint8_t*>(levels);
    for (int64_t g = first_group + t; g < first_group + 4 * static_cast<int64_t>(words);
         g += kChooseThreads) {
        uint32_t above = 0, level = 0;
        if (g < end_group) {
            float z[kGroup];
            load_group(row, g, z);
            const uint32_t valid = valid_bits(row.length, g);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                const uint32_t key = ordered_key(z[j]);
                above |= static_cast<uint32_t>(key > prefix) << j;
                level |= static_cast<uint32_t>(key == prefix) << j;
            }
            above &= valid;
            level &= valid;
        }
        mark_bytes[g - first_group] = static_cast<uint8_t>(above);
        level_bytes[g - first_group] = static_cast<uint8_t>(level);
    }
    __syncthreads();
    const int each = (words + kChooseThreads - 1) / kChooseThreads;
    const int first = t * each, end = min(first + each, words);
    uint32_t above = 0, level = 0, total_above = 0, total_level = 0;
    for (int w = first; w < end; ++w)
        above += __popc(marks[w]), level += __popc(levels[w]);
    uint32_t above_before = scan_block(above, s.scratch, &total_above);
    uint32_t level_before = scan_block(level, s.scratch, &total_level);
    if (t == 0)
        s.strictly = total_above, s.level = total_level;
    cluster.sync();
    for (int b = 0; b < static_cast<int>(cluster.block_rank()); ++b) {
        above_before += *cluster.map_shared_rank(&s.strictly, b);
        level_before += *cluster.map_shared_rank(&s.level, b);
    }
    // Of the scores at the threshold the first `left` of the row are taken.
    uint32_t place = above_before + min(level_before, left);
    for (int w = first; w < end; ++w) {
        const uint32_t here = levels[w];
        const uint32_t take =
            lowest_bits(here, static_cast<int>(left) - static_cast<int>(min(level_before, left)));
        level_before += __popc(here);
        for (uint32_t word = marks[w] | take; word != 0; word &= word - 1)
            out[place++] =
                static_cast<int32_t>(row.slot(first_group * kGroup + w * 32 + __ffs(word) - 1));
    }
    cluster.sync();  // no block may leave while its counts are read
}

__global__ void __launch_bounds__(kChooseThreads) choose_rows(const Args a) {
    extern __shared__ uint4 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    uint32_t* keys = reinterpret_cast<uint32_t*>(&s + 1);
    uint32_t* columns = keys + a.buffer_size;
    uint32_t* marks = columns + a.buffer_size;
    uint32_t* levels = marks + a.mark_words;
    cg::cluster_group cluster = cg::this_cluster();
    const int t = threadIdx.x, blocks = static_cast<int>(cluster.num_blocks());
    const int rank = static_cast<int>(cluster.block_rank());
    const int64_t r = blockIdx.x / blocks;
    wait_for_inputs();
    Row row;
    row.scores = a.p.scores + r * a.p.score_stride;
    row.list = a.p.block_list == nullptr ? nullptr : a.p.block_list + r / a.p.rows * a.p.blocks;
    row.block_shift = a.block_shift;
    row.full = a.p.full_rows != 0;
    const int64_t capacity = static_cast<int64_t>(a.p.blocks) << a.block_shift;
    row.length = max(int64_t{0}, min(static_cast<int64_t>(a.p.row_slots[r]), capacity));
    const int k = static_cast<int>(min(static_cast<int64_t>(a.p.top_k), row.length));
    int32_t* out = a.p.slots_out + r * a.p.top_k;
    if (row.length <= a.buffer_size) {
        if (rank != 0)
            return;
        const int count = static_cast<int>(row.length);
        for (int i = t; i < count; i += kChooseThreads) {
            keys[i] = ordered_key(*row.at(i));
            columns[i] = static_cast<uint32_t>(i);
        }
        finish(a, row, s, keys, columns, count, k, out);
        return;
    }
    // Slices of whole words of marks, in rank order.
    const int64_t groups = (row.length + kGroup - 1) / kGroup;
    const int64_t slice = ((groups + blocks - 1) / blocks + 3) / 4 * 4;
    const int64_t first_group = min(rank * slice, groups);
    const int64_t end_group = min(first_group + slice, groups);
    const int words = static_cast<int>((end_group - first_group + 3) / 4);

    // Enough of the sample that fewer than k of the row lie above only by rare bad luck.
    const float expected = static_cast<float>(k) * kSampleSize / static_cast<float>(row.length);
    const float wanted = expected + 6.0f * sqrtf(expected) + 8.0f;
    const uint32_t bound = sample_bound(row, static_cast<uint32_t>(wanted), s.scratch);
    bool usable = bound > kKeyOfMinusInfinity;  // else a bound would hide NaN
    if (usable) {
        const float lowest = float_of_key(bound);
        uint8_t* mark_bytes = reinterpret_cast<uint8_t*>(marks);
        for (int64_t g = first_group + t; g < first_group + 4 * static_cast<int64_t>(words);
             g += kChooseThreads) {
            uint32_t mark = 0;
            if (g < end_group) {
                float z[kGroup];
                load_group(row, g, z);
#pragma unroll
                for (int j = 0; j < kGroup; ++j)
                    mark |= static_cast<uint32_t>(z[j] >= lowest) << j;
                mark &= valid_bits(row.length, g);
            }
            mark_bytes[g - first_group] = static_cast<uint8_t>(mark);
        }
        __syncthreads();
        const uint32_t capacity_left = static_cast<uint32_t>(a.buffer_size);
        const uint32_t marked =
            list_marks(marks, words, first_group * kGroup, columns, capacity_left, s.scratch);
        if (t == 0)
            s.marked = marked;
        if (marked <= capacity_left)
            for (uint32_t i = t; i < marked; i += kChooseThreads)
                keys[i] = ordered_key(*row.at(columns[i]));
        cluster.sync();
        uint32_t total = 0;
        for (int b = 0; b < blocks; ++b)
            total += *cluster.map_shared_rank(&s.marked, b);
        usable = total >= static_cast<uint32_t>(k) && total <= capacity_left;
        if (usable && rank == 0) {
            uint32_t place = marked;
            for (int b = 1; b < blocks; ++b) {
                const uint32_t n = *cluster.map_shared_rank(&s.marked, b);
                const uint32_t* their_keys = cluster.map_shared_rank(keys, b);
                const uint32_t* their_columns = cluster.map_shared_rank(columns, b);
                for (uint32_t i = t; i < n; i += kChooseThreads) {
                    keys[place + i] = their_keys[i];
                    columns[place + i] = their_columns[i];
                }
                place += n;
            }
        }
        cluster.sync();  // the others may leave
        if (usable) {
            if (rank == 0)
                finish(a, row, s, keys, columns, static_cast<int>(total), k, out);
            return;
        }
    }
    descend(a, row, s, marks, levels, first_group, end_group, k, out);
}

}  // namespace
}  // namespace spin

extern "C" int spin_topk_slots(const SpinTopkSlotsParams* p, cudaStream_t stream) {
    using namespace spin;
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, entries, 0, kMaxEntries);
    if (p->entries == 0)
        return SPIN_OK;
    SPIN_CHECK_POINTER(p, scores, 16);
    SPIN_CHECK_POINTER(p, row_slots, 4);
    SPIN_CHECK_POINTER(p, slots_out, 4);
    SPIN_CHECK_RANGE(p, rows, 1, kMaxRows);
    SPIN_CHECK_RANGE(p, top_k, 1, kMaxTopK);
    SPIN_CHECK(is_block_size(p->block_size), SPIN_ERROR_UNSUPPORTED, "block_size",
               "8, 16, 32, 64, 128");
    SPIN_CHECK_RANGE(p, blocks, 1, kMaxSlots / p->block_size);
    const int64_t capacity = static_cast<int64_t>(p->blocks) * p->block_size;
    SPIN_CHECK(p->score_stride % 8 == 0 && p->score_stride >= capacity - p->block_size + 1,
               SPIN_ERROR_ALIGNMENT, "score_stride", "a multiple of 8 that holds every block");
    Args a = {};
    a.p = *p;
    a.block_shift = __builtin_ctz(static_cast<unsigned>(p->block_size));
    // Longer rows leave more to choose from, as the sample gets coarser.
    a.buffer_size = p->top_k <= 1024 && capacity <= (1 << 19) ? kMaxBufferSize / 2 : kMaxBufferSize;
    const int64_t rows = static_cast<int64_t>(p->entries) * p->rows;
    // Small batches spread a row over many multiprocessors; large ones have rows enough.
    int cluster = rows <= 32 ? kMaxCluster : rows <= 128 ? 4 : rows <= 256 ? 2 : 1;
    if (capacity <= a.buffer_size)
        cluster = 1;
    auto mark_words = [&](int n) {
        const int64_t groups = (capacity + kGroup - 1) / kGroup;
        return ((groups + n - 1) / n + 3) / 4;
    };
    while (cluster < kMaxCluster && mark_words(cluster) * 4 * 2 > kMarkBytes)
        cluster *= 2;
    SPIN_CHECK(mark_words(cluster) * 4 * 2 <= 2 * kMarkBytes, SPIN_ERROR_UNSUPPORTED, "blocks",
               "at most 3145728 slots a row");
    a.mark_words = static_cast<int32_t>(mark_words(cluster));
    const size_t shared =
        sizeof(Shared) + sizeof(uint32_t) * (2 * static_cast<size_t>(a.buffer_size) +
                                             2 * static_cast<size_t>(a.mark_words));
    const dim3 grid(static_cast<unsigned>(rows * cluster));
    return launch(choose_rows, grid, kChooseThreads, shared, cluster, stream, a);
}
