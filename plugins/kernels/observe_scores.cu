// SPDX-License-Identifier: Apache-2.0
// spin_observe_scores: the update of the averages alone.
#include "spin/observe_scores.h"
#include "status.h"
#include "tiles.cuh"

namespace spin {
namespace {

template <typename State>
int run(const SpinObserveScoresParams& p, cudaStream_t stream) {
    TileArgs<State> a = {};
    a.v = static_cast<State*>(p.v);
    a.d = static_cast<State*>(p.d);
    a.lanes = p.lanes;
    a.observed_positions = p.positions;
    a.scores = p.scores;
    a.compact_of_block = p.compact_of_block;
    a.accepted = p.accepted;
    a.v_stride = p.v_stride;
    a.tile_stride = SPIN_ADVANCE_TILE_SLOTS;
    a.d_stride = p.d_stride;
    a.score_stride = p.score_stride;
    a.lanes_total = p.lanes_total;
    a.entries = p.entries;
    a.sequences = p.entries;
    a.rows = p.rows;
    a.blocks = p.blocks;
    a.tiles = static_cast<int32_t>(p.slots / SPIN_ADVANCE_TILE_SLOTS) + 1;
    a.ratio = p.ratio;
    a.block_size = p.block_size;
    a.block_shift = __builtin_ctz(static_cast<unsigned>(p.block_size));
    a.full_rows = p.full_rows;
    a.row0_update = p.row0_update;
    a.slots = p.slots;
    a.decay = p.decay;
    a.gain = p.gain;
    const dim3 grid(static_cast<unsigned>(p.entries), tile_workers(p.entries, a.tiles));
    const auto kernel = p.rows == 1 ? update_tiles<State, false, 1> : update_tiles<State, false, 0>;
    return launch(kernel, grid, kTileThreads, 0, 1, stream, a);
}

}  // namespace
}  // namespace spin

extern "C" int spin_observe_scores(const SpinObserveScoresParams* p, cudaStream_t stream) {
    using namespace spin;
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, entries, 0, kMaxEntries);
    if (p->entries == 0)
        return SPIN_OK;
    SPIN_CHECK_POINTER(p, v, 16);
    SPIN_CHECK_POINTER(p, d, 16);
    SPIN_CHECK_POINTER(p, lanes, 8);
    SPIN_CHECK_POINTER(p, positions, 8);
    SPIN_CHECK_POINTER(p, accepted, 8);
    SPIN_CHECK_POINTER(p, scores, 16);
    SPIN_CHECK_POINTER(p, compact_of_block, 4);
    SPIN_CHECK_RANGE(p, lanes_total, 1, kMaxLanes);
    SPIN_CHECK_RANGE(p, rows, 1, kMaxRows);
    SPIN_CHECK_RANGE(p, slots, 1, kMaxSlots);
    SPIN_CHECK_RANGE(p, ratio, 1, 1 << 20);
    SPIN_CHECK(is_block_size(p->block_size), SPIN_ERROR_UNSUPPORTED, "block_size",
               "8, 16, 32, 64, 128");
    SPIN_CHECK(p->state_dtype == SPIN_STATE_BF16 || p->state_dtype == SPIN_STATE_FP32,
               SPIN_ERROR_UNSUPPORTED, "state_dtype", "SPIN_STATE_BF16, SPIN_STATE_FP32");
    SPIN_CHECK(p->v_stride % 8 == 0 && p->v_stride >= p->slots, SPIN_ERROR_ALIGNMENT, "v_stride",
               "a multiple of 8, at least slots");
    SPIN_CHECK(p->d_stride % 8 == 0 && p->d_stride > p->slots, SPIN_ERROR_ALIGNMENT, "d_stride",
               "a multiple of 8, at least slots + 1");
    SPIN_CHECK(p->blocks == (p->slots + p->block_size - 1) / p->block_size, SPIN_ERROR_RANGE,
               "blocks", "slots / block_size, rounded up");
    SPIN_CHECK(p->score_stride % 8 == 0 && p->score_stride >= p->slots, SPIN_ERROR_ALIGNMENT,
               "score_stride", "a multiple of 8, at least slots");
    return p->state_dtype == SPIN_STATE_BF16 ? run<__nv_bfloat16>(*p, stream)
                                             : run<float>(*p, stream);
}
