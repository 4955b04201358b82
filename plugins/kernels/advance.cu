// SPDX-License-Identifier: Apache-2.0
// spin_advance: resolve, observe and predict at the start of a step, for all layers; one launch.
#include <climits>

#include "spin/advance.h"
#include "status.h"
#include "tiles.cuh"

namespace spin {
namespace {

template <typename State>
int run(const SpinAdvanceParams& p, cudaStream_t stream) {
    TileArgs<State> a = {};
    a.v = static_cast<State*>(p.v);
    a.d = static_cast<State*>(p.d);
    a.lanes = p.lanes;
    a.observed_positions = p.lane_positions;
    a.scores = p.scores;
    a.compact_of_block = p.compact_of_block;
    a.positions = p.positions;
    a.tenants = p.tenants;
    a.lane_tenant = p.lane_tenant;
    a.lane_slots = p.lane_slots;
    a.lane_waits = p.lane_waits;
    a.lane_warm = p.lane_warm;
    a.lane_next = p.lane_next;
    a.places = p.places;
    a.warm = p.warm;
    a.observed_rows = p.observed_rows;
    a.block_scores = p.block_scores;
    a.v_stride = p.v_stride;
    a.v_layer_stride = p.v_layer_stride;
    a.d_stride = p.d_stride;
    a.d_layer_stride = p.d_layer_stride;
    a.tile_stride = p.tile_stride;
    a.score_stride = p.score_stride;
    a.lane_stride = p.lane_stride;
    a.lanes_total = p.lanes_total;
    a.entries = p.entries;
    a.sequences = p.sequences;
    a.rows = p.rows;
    a.blocks = p.blocks;
    a.tiles = p.tiles;
    a.ratio = p.ratio;
    a.block_size = p.block_size;
    a.block_shift = __builtin_ctz(static_cast<unsigned>(p.block_size));
    a.slots = p.slots;
    a.row0_update = p.row0_update;
    a.decay = p.decay;
    a.gain = p.gain;
    const dim3 grid(static_cast<unsigned>(p.entries), tile_workers(p.entries, p.tiles));
    const auto kernel = p.rows == 1 ? update_tiles<State, true, 1> : update_tiles<State, true, 0>;
    return launch(kernel, grid, kTileThreads, 0, 1, stream, a);
}

}  // namespace
}  // namespace spin

extern "C" int spin_advance(const SpinAdvanceParams* p, cudaStream_t stream) {
    using namespace spin;
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, entries, 0, kMaxEntries);
    if (p->entries == 0)
        return SPIN_OK;
    SPIN_CHECK_POINTER(p, v, 16);
    SPIN_CHECK_POINTER(p, d, 16);
    SPIN_CHECK_POINTER(p, lanes, 8);
    SPIN_CHECK_POINTER(p, positions, 8);
    if (p->tenants != nullptr) {
        SPIN_CHECK_POINTER(p, tenants, 8);
        SPIN_CHECK_POINTER(p, lane_tenant, 8);
    }
    if (p->lane_slots != nullptr) {
        SPIN_CHECK_POINTER(p, lane_slots, 8);
    }
    SPIN_CHECK_POINTER(p, lane_positions, 8);
    SPIN_CHECK_POINTER(p, lane_waits, 1);
    SPIN_CHECK_POINTER(p, lane_warm, 1);
    SPIN_CHECK_POINTER(p, lane_next, 8);
    SPIN_CHECK_POINTER(p, scores, 16);
    SPIN_CHECK_POINTER(p, compact_of_block, 4);
    SPIN_CHECK_POINTER(p, places, 8);
    SPIN_CHECK_POINTER(p, warm, 1);
    SPIN_CHECK_POINTER(p, observed_rows, 4);
    SPIN_CHECK_POINTER(p, block_scores, 8);
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
    SPIN_CHECK(p->v_layer_stride % 8 == 0 && p->v_layer_stride >= 0, SPIN_ERROR_ALIGNMENT,
               "v_layer_stride", "a multiple of 8, at least 0");
    SPIN_CHECK(p->d_layer_stride % 8 == 0 && p->d_layer_stride >= 0, SPIN_ERROR_ALIGNMENT,
               "d_layer_stride", "a multiple of 8, at least 0");
    SPIN_CHECK(p->tile_stride % 8 == 0 && p->tile_stride >= SPIN_ADVANCE_TILE_SLOTS,
               SPIN_ERROR_ALIGNMENT, "tile_stride",
               "a multiple of 8, at least SPIN_ADVANCE_TILE_SLOTS");
    SPIN_CHECK(p->tile_stride * p->tiles <= INT32_MAX / 4, SPIN_ERROR_UNSUPPORTED, "tile_stride",
               "a lane whose averages span less than 2 GiB");
    SPIN_CHECK(p->blocks == (p->slots + p->block_size - 1) / p->block_size, SPIN_ERROR_RANGE,
               "blocks", "slots / block_size, rounded up");
    SPIN_CHECK(p->score_stride % 8 == 0 &&
                   p->score_stride >= static_cast<int64_t>(p->blocks) * p->block_size,
               SPIN_ERROR_ALIGNMENT, "score_stride",
               "a multiple of 8, at least blocks * block_size");
    SPIN_CHECK(p->tiles == p->slots / SPIN_ADVANCE_TILE_SLOTS + 1, SPIN_ERROR_RANGE, "tiles",
               "slots / SPIN_ADVANCE_TILE_SLOTS + 1");
    SPIN_CHECK_RANGE(p, sequences, 1, p->entries);
    SPIN_CHECK(p->entries % p->sequences == 0, SPIN_ERROR_RANGE, "sequences",
               "a divisor of entries");
    SPIN_CHECK_LANES(p);
    return p->state_dtype == SPIN_STATE_BF16 ? run<__nv_bfloat16>(*p, stream)
                                             : run<float>(*p, stream);
}
