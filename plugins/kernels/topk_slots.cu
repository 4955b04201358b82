// SPDX-License-Identifier: Apache-2.0
// spin_topk_slots: a cluster of thread blocks a row.
//
// Short rows: the first block of the cluster holds the whole row in shared memory and chooses.
// Long rows: a sample of the row gives a bound that the k-th best score very likely exceeds by a
// little, one pass over the row marks every score at or above it, and the first block chooses among
// those. The bound only decides how many are marked: if they are fewer than k, or more than fit
// (a plateau of equal scores, say), the cluster finds the exact threshold by a radix descent over
// the row instead. Marks are bits in slot order, so the result is ordered and the same every time.
#include "spin/topk_slots.h"
#include "status.h"
#include "topk_row.cuh"

namespace spin {
namespace {

constexpr int kMaxTopK = 2048;
constexpr int kMarkBytes = 48 * 1024;  // shared memory for one block's marks and levels
constexpr int kFewThreads = 256, kManyThreads = 512;

// kBlocks: thread blocks a multiprocessor.
template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks > 1 ? kBlocks - kFewerBlocks : 1)
    choose_rows(const TopkArgs a) {
    // Groups of eight scores that a thread has in flight.
    constexpr int kAhead = kBlocks == 1 ? 4 : kBlocks == 2 ? 2 : 3;
    namespace cg = cooperative_groups;
    extern __shared__ uint4 memory[];
    auto& s = *reinterpret_cast<TopkShared<kThreads>*>(memory);
    uint32_t* keys = reinterpret_cast<uint32_t*>(&s + 1);
    uint32_t* slots = keys + a.buffer_size;
    uint32_t* marks = slots + a.buffer_size;
    uint32_t* levels = marks + a.mark_words;
    cg::cluster_group cluster = cg::this_cluster();
    const int t = threadIdx.x, blocks = static_cast<int>(cluster.num_blocks());
    const int rank = static_cast<int>(cluster.block_rank());
    const int64_t r = blockIdx.x / static_cast<unsigned>(blocks);
    wait_for_inputs();
    const int seen = a.p.row_slots[r];  // on its way while the place is looked up
    Row row;
    const uint32_t entry = static_cast<uint32_t>(r) / static_cast<uint32_t>(a.p.rows);
    int64_t stored = r;
    if (a.p.places != nullptr) {
        stored += (a.p.places[entry] - entry) * a.p.rows;
    }
    row.scores = a.p.scores + stored * a.p.score_stride;
    row.list = nullptr;
    if (a.p.block_list != nullptr) {
        row.list = a.p.block_list + static_cast<int64_t>(entry) * a.p.blocks;
    }
    row.block_shift = a.block_shift;
    row.full = a.p.full_rows != 0;
    row.length = max(0, min(seen, a.p.blocks << a.block_shift));
    const int k = min(a.p.top_k, row.length);
    int32_t* out = a.p.slots_out + r * a.p.top_k;
    if (row.length <= a.buffer_size) {
        if (rank == 0) {
            for (int i = t; i < row.length; i += kThreads) {
                keys[i] = ordered_key(*row.at(i));
                slots[i] = static_cast<uint32_t>(row.slot(i));
            }
            finish_row(s, keys, slots, row.length, k, a.p.top_k, out);
        }
        return;
    }
    // Slices of whole words of marks, in rank order.
    const int groups = (row.length + kGroup - 1) / kGroup;
    const int slice = ((groups + blocks - 1) / blocks + 3) / 4 * 4;
    const int first_group = min(rank * slice, groups);
    const int end_group = min(first_group + slice, groups);
    const int words = (end_group - first_group + 3) / 4;

    // The sample comes first; the slice is on its way while the bound is found.
    const int pieces = kThreads == kManyThreads && row.length <= 1 << 17 ? 1 : 2;
    float4 sample[kSampleEach / 4] = {};
    load_sample<kThreads>(row, pieces, sample);
    float ahead[kAhead][kGroup];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
        row.load_group(min(first_group + t + n * kThreads, groups - 1), ahead[n]);
    }
    if (!row.full) {
        for (int g = first_group + kAhead * kThreads + 4 * t; g < end_group; g += 4 * kThreads) {
            prefetch(row.at(g * kGroup));
        }
    }
    // Enough of the sample that fewer than k of the row lie above only by rare bad luck.
    const float expected =
        static_cast<float>(k) * (4 * pieces * kThreads) / static_cast<float>(row.length);
    const float wanted = expected + 6.0f * sqrtf(expected) + 8.0f;
    if (t == 0) {
        s.highest = 0;
    }
    cluster.barrier_arrive();
    const float bound = sample_bound(sample, pieces, static_cast<uint32_t>(wanted), s.scratch);
    cluster.barrier_wait();  // every block has begun: its shared memory may be written to
    bool usable = bound > minus_infinity();  // else it would hide NaN, which counts as -inf
    if (usable) {
        uint8_t* mark_bytes = reinterpret_cast<uint8_t*>(marks);
        for (int first = t; first < 4 * words; first += kAhead * kThreads) {
#pragma unroll
            for (int n = 0; n < kAhead; ++n) {
                const int i = first + n * kThreads, g = first_group + i;
                uint32_t mark = 0;
#pragma unroll
                for (int j = 0; j < kGroup; ++j) {
                    mark |= static_cast<uint32_t>(ahead[n][j] >= bound) << j;
                }
                if (i < 4 * words) {
                    mark_bytes[i] =
                        static_cast<uint8_t>(g < end_group ? mark & row.valid_bits(g) : 0);
                }
            }
            if (first + kAhead * kThreads < 4 * words) {
#pragma unroll
                for (int n = 0; n < kAhead; ++n) {
                    const int next = first_group + first + (kAhead + n) * kThreads;
                    row.load_group(min(next, groups - 1), ahead[n]);
                }
            }
        }
        __syncthreads();
        const uint32_t fits = static_cast<uint32_t>(a.buffer_size);
        const uint32_t marked =
            list_marks(marks, words, first_group * kGroup, slots, fits, s.scratch);
        if (t < blocks) {
            cluster.map_shared_rank(s.marked, t)[rank] = marked;
        }
        cluster.sync();
        uint32_t total = 0, before = 0;
        for (int b = 0; b < blocks; ++b) {
            before += b < rank ? s.marked[b] : 0;
            total += s.marked[b];
        }
        usable = total >= static_cast<uint32_t>(k) && total <= fits;
        if (usable) {
            // The first block's own come first and stay in place; the others send theirs.
            uint32_t* their_keys = cluster.map_shared_rank(keys, 0);
            uint32_t* their_slots = cluster.map_shared_rank(slots, 0);
            uint32_t highest = 0;
            for (uint32_t i = t; i < marked; i += kThreads) {
                const int column = static_cast<int>(slots[i]);
                const uint32_t key = ordered_key(*row.at(column));
                their_slots[before + i] = static_cast<uint32_t>(row.slot(column));
                their_keys[before + i] = key;
                highest = max(highest, key);
            }
            highest = __reduce_max_sync(kAllLanes, highest);
            if ((t & 31) == 0 && highest > 0) {
                atomicMax(cluster.map_shared_rank(&s.highest, 0), highest);
            }
        }
        cluster.sync();
        if (usable) {
            if (rank == 0) {
                const Range range = Range::of(ordered_key(bound), s.highest);
                finish_row(s, keys, slots, static_cast<int>(total), k, a.p.top_k, out, range);
            }
            return;
        }
    }
    descend(row, s, marks, levels, first_group, end_group, k, out);
}

}  // namespace
}  // namespace spin

extern "C" int spin_topk_slots(const SpinTopkSlotsParams* p, cudaStream_t stream) {
    using namespace spin;
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, entries, 0, kMaxEntries);
    if (p->entries == 0) {
        return SPIN_OK;
    }
    SPIN_CHECK_POINTER(p, scores, 16);
    if (p->places != nullptr) {
        SPIN_CHECK_POINTER(p, places, 8);
    }
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
    TopkArgs a = {};
    a.p = *p;
    a.block_shift = __builtin_ctz(static_cast<unsigned>(p->block_size));
    // More to choose, and longer rows, whose sample is coarser, leave more to choose from.
    const bool small = p->top_k <= 512 && capacity <= (1 << 17);
    a.buffer_size = small ? kMaxBufferSize / 2 : kMaxBufferSize;
    const int64_t rows = static_cast<int64_t>(p->entries) * p->rows;
    // Few rows spread over many multiprocessors; many rows fill them anyway. The steps are where
    // the next smaller cluster was quicker: not all of 132 multiprocessors sit where a cluster of
    // eight finds room, and a second wave costs more than longer slices.
    int cluster = rows <= 12 ? kMaxCluster : rows <= 24 ? 4 : rows <= 132 ? 2 : 1;
    if (capacity <= a.buffer_size) {
        cluster = 1;
    }
    auto mark_words = [&](int n) {
        const int64_t groups = (capacity + kGroup - 1) / kGroup;
        return ((groups + n - 1) / n + 3) / 4;
    };
    Device device = {};
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) {
        return launched(error);
    }
    const auto shared_bytes = [&](int n) {
        return static_cast<int64_t>(sizeof(TopkShared<kManyThreads>)) + a.buffer_size * 8 +
               mark_words(n) * 8;
    };
    while (cluster < kMaxCluster &&
           (mark_words(cluster) * 8 > kMarkBytes || shared_bytes(cluster) > device.shared_bytes)) {
        cluster *= 2;
    }
    if (shared_bytes(cluster) > device.shared_bytes) {
        a.buffer_size = kMaxBufferSize / 2;
    }
    SPIN_CHECK(
        mark_words(cluster) * 8 <= 2 * kMarkBytes && shared_bytes(cluster) <= device.shared_bytes,
        SPIN_ERROR_UNSUPPORTED, "blocks",
        "at most 3145728 slots a row, fewer where shared memory is small");
    a.mark_words = static_cast<int32_t>(mark_words(cluster));
    const size_t words =
        2 * static_cast<size_t>(a.buffer_size) + 2 * static_cast<size_t>(a.mark_words);
    const dim3 grid(static_cast<unsigned>(rows * cluster));
    if (cluster == kMaxCluster && capacity <= 1 << 16) {  // slices too short for more threads
        return launch(choose_rows<kFewThreads, 3>, grid, kFewThreads,
                      sizeof(TopkShared<kFewThreads>) + 4 * words, cluster, stream, a);
    }
    const auto kernel =
        rows * cluster <= 132 ? choose_rows<kManyThreads, 1> : choose_rows<kManyThreads, 2>;
    return launch(kernel, grid, kManyThreads, sizeof(TopkShared<kManyThreads>) + 4 * words, cluster,
                  stream, a);
}
