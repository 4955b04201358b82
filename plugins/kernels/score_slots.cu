// SPDX-License-Identifier: Apache-2.0
//
// Host side of score_slots: checks the arguments, picks the kernel, launches it.

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/score_kernel.cuh"
#include "spin/score_slots.h"
#include "status.h"

namespace spin {
namespace {

using namespace score;

constexpr int kControlBytes = sizeof(Control);

int log2_of(int power_of_two) {
    int exponent = 0;
    while (power_of_two >> (exponent + 1)) {
        ++exponent;
    }
    return exponent;
}

// Columns that the longest possible sequence writes.
int64_t max_columns(const SpinScoreSlotsParams& p) {
    const int64_t slots = int64_t{p.page_table_width} * p.page_slots;
    return p.block_list ? std::min(slots, int64_t{p.blocks} * p.block_size) : slots;
}

int check(const SpinScoreSlotsParams* p) {
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, sequences, 0, kMaxEntries);
    SPIN_CHECK_RANGE(p, rows, 1, kMaxRows);
    SPIN_CHECK(p->heads == 32 || p->heads == 64, SPIN_ERROR_RANGE, "heads", "32, 64");
    SPIN_CHECK(p->page_slots == 32 || p->page_slots == 64, SPIN_ERROR_RANGE, "page_slots",
               "32, 64");
    SPIN_CHECK(is_block_size(p->block_size) && p->block_size >= kMinChunkSlots, SPIN_ERROR_RANGE,
               "block_size", "16, 32, 64, 128");
    SPIN_CHECK_RANGE(p, arithmetic, SPIN_SCORE_EXACT, SPIN_SCORE_PORTABLE);
    SPIN_CHECK_RANGE(p, num_pages, 0, INT32_MAX);
    SPIN_CHECK_RANGE(p, page_table_width, 0, kMaxSlots / p->page_slots);
    SPIN_CHECK(p->page_table_stride >= p->page_table_width, SPIN_ERROR_RANGE, "page_table_stride",
               "page_table_width or more");
    SPIN_CHECK((p->block_list == nullptr) == (p->block_count == nullptr), SPIN_ERROR_NULL,
               "block_count", "null exactly when block_list is");
    if (p->block_list != nullptr) {
        SPIN_CHECK_RANGE(p, blocks, 0, kMaxSlots / p->block_size);
        SPIN_CHECK(p->block_list_stride >= p->blocks, SPIN_ERROR_RANGE, "block_list_stride",
                   "blocks or more");
    }
    SPIN_CHECK(p->score_stride >= max_columns(*p), SPIN_ERROR_RANGE, "score_stride",
               "every listed slot of a sequence, or more");
    if (p->sequences == 0 || max_columns(*p) == 0) {
        return SPIN_OK;  // nothing will be touched
    }
    SPIN_CHECK_POINTER(p, query, 16);
    SPIN_CHECK_POINTER(p, weights, 4);
    SPIN_CHECK_POINTER(p, pages, 16);
    SPIN_CHECK_POINTER(p, page_table, 4);
    SPIN_CHECK_POINTER(p, visible_slots, 4);
    SPIN_CHECK_POINTER(p, scores, 4);
    if (p->places != nullptr) {
        SPIN_CHECK_POINTER(p, places, 8);
    }
    return SPIN_OK;
}

// The arguments from a sequence and row of the batch on.
ScoreArgs make_args(const SpinScoreSlotsParams& p, int64_t sequence, int64_t row) {
    const int64_t first_row = sequence * p.rows + row;
    ScoreArgs args = {};
    args.query = static_cast<const uint8_t*>(p.query) + first_row * p.heads * kKeyDim;
    args.weights = p.weights + first_row * p.heads;
    args.pages = static_cast<const uint8_t*>(p.pages);
    args.page_table = p.page_table + sequence * p.page_table_stride;
    args.visible_slots = p.visible_slots + sequence;
    if (p.block_list != nullptr) {
        args.block_list = p.block_list + sequence * p.block_list_stride;
        args.block_count = p.block_count + sequence;
    }
    args.scores = p.scores + (p.places != nullptr ? row : first_row) * p.score_stride;
    args.places = p.places != nullptr ? p.places + sequence : nullptr;
    args.num_pages = p.num_pages;
    args.page_table_stride = p.page_table_stride;
    args.block_list_stride = p.block_list_stride;
    args.score_stride = p.score_stride;
    args.rows_per_sequence = p.rows;
    args.max_slots = p.page_table_width * p.page_slots;
    args.max_blocks = p.blocks;
    args.log2_page = log2_of(p.page_slots);
    args.log2_block = log2_of(p.block_size);
    args.log2_chunk = log2_of(std::min({p.block_size, p.page_slots, kHalfSlots}));
    return args;
}

// Splits what one launch cannot hold: sequences beyond kMaxSequences, or more query rows than fit
// into shared memory beside a useful ring (which happens on small-memory architectures).
template <class Arithmetic, int kHeads>
int launch_all(const SpinScoreSlotsParams& p, const Device& device, cudaStream_t stream) {
    constexpr int kMinRingBytes = kMinStages * kWarpgroups * kTileBytes;
    const int room = device.shared_bytes - kControlBytes;
    const int rows_at_once = std::min(p.rows, (room - kMinRingBytes) / Arithmetic::kQueryRowBytes);
    const int64_t max_tiles = max_columns(p) / kTileSlots + 2;
    const int sequences_at_once =
        static_cast<int>(std::min<int64_t>(kMaxSequences, INT_MAX / max_tiles));

    for (int sequence = 0; sequence < p.sequences; sequence += sequences_at_once) {
        for (int row = 0; row < p.rows; row += rows_at_once) {
            ScoreArgs args = make_args(p, sequence, row);
            args.sequences = std::min(sequences_at_once, p.sequences - sequence);
            args.rows = std::min(rows_at_once, p.rows - row);
            const int query_bytes = args.rows * Arithmetic::kQueryRowBytes;
            args.query_buffers = room - 2 * query_bytes >= kMinRingBytes ? 2 : 1;
            const int ring_room = room - args.query_buffers * query_bytes;
            args.stages = std::min(kMaxStages, ring_room / kTileBytes) / kWarpgroups;
            const int shared_bytes = kControlBytes + args.query_buffers * query_bytes +
                                     args.stages * kWarpgroups * kTileBytes;
            const int grid = static_cast<int>(
                std::min<int64_t>(device.multiprocessors, args.sequences * max_tiles));
            const auto kernel = args.rows == 1 ? score_slots_kernel<Arithmetic, kHeads, true>
                                               : score_slots_kernel<Arithmetic, kHeads, false>;
            const int status = launch(kernel, dim3(grid), kThreads, shared_bytes, 1, stream, args);
            if (status != SPIN_OK) {
                return status;
            }
        }
    }
    return SPIN_OK;
}

template <int kHeads>
int dispatch(const SpinScoreSlotsParams& p, const Device& device, cudaStream_t stream) {
    if (device.compute_capability != 90 || p.arithmetic == SPIN_SCORE_PORTABLE) {
        return launch_all<PortableArithmetic<kHeads>, kHeads>(p, device, stream);
    }
    if (p.arithmetic == SPIN_SCORE_FAST) {
        return launch_all<FastArithmetic<kHeads>, kHeads>(p, device, stream);
    }
    return launch_all<ExactArithmetic<kHeads>, kHeads>(p, device, stream);
}

}  // namespace
}  // namespace spin

extern "C" int spin_score_slots(const SpinScoreSlotsParams* params, cudaStream_t stream) {
    using namespace spin;
    const int problem = check(params);
    if (problem != SPIN_OK || params->sequences == 0 || max_columns(*params) == 0) {
        return problem;
    }
    Device device = {};
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) {
        return launched(error);
    }
    SPIN_CHECK(device.compute_capability >= 90, SPIN_ERROR_UNSUPPORTED, "device",
               "compute capability 9.0 or newer");
    return params->heads == 32 ? dispatch<32>(*params, device, stream)
                               : dispatch<64>(*params, device, stream);
}
