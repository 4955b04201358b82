// SPDX-License-Identifier: Apache-2.0
// Where an entry of spin_advance stands, and what the step that waits under its lane came to
// (advance.h).
//
// Every thread block of an entry finds out for itself: these few words come from the L2 cache, and
// a launch of its own would take the host longer than all of them take here. The books are
// therefore only read; spin_select_blocks writes them.
#pragma once

#include "tile_parts.cuh"

namespace spin {

struct Standing {
    int64_t place;     // lane, or lanes_total + batch row
    int32_t observed;  // rows
    bool warm;
};

// For the first warp of a block, thread r of which looks after row r: `now` and `past` become the
// row's token positions in this step and in the one that waits, or -1.
template <typename State>
__device__ __forceinline__ Standing resolve(const TileArgs<State>& a, uint32_t e, int rows,
                                            int64_t& now, int64_t& past) {
    constexpr uint32_t kAll = 0xffffffffu;
    const int r = threadIdx.x;
    const int64_t s = e % static_cast<uint32_t>(a.sequences);
    const int64_t lane = entry_lane(a.lanes, a.lane_stride, a.sequences, e);
    now = r < rows ? a.positions[s * rows + r] : -1;
    past = -1;
    Standing found = {a.lanes_total + s, 0, false};
    const int64_t first = __shfl_sync(kAll, now, 0);
    if (lane < 0 || first < 0) {
        return found;
    }
    // Loads that go out together.
    const uint32_t own = static_cast<uint32_t>(lane) % static_cast<uint32_t>(a.lane_stride);
    const int64_t room = a.lane_slots != nullptr ? a.lane_slots[own] : INT64_MAX;
    const bool same = a.tenants == nullptr || a.lane_tenant[lane] == a.tenants[s];
    const bool waits = a.lane_waits[lane] != 0;
    const bool was_warm = a.lane_warm[lane] != 0;
    const int64_t next = a.lane_next[lane];
    past = r < rows ? a.observed_positions[lane * rows + r] : -1;
    if (__any_sync(kAll, query_slot(now, a.ratio) >= room)) {
        return found;
    }
    found.place = lane;
    found.warm = same && was_warm && next == first;
    const int waiting = __ffs(~__ballot_sync(kAll, past >= 0)) - 1;  // rows before the padding
    const int64_t accepted = first - __shfl_sync(kAll, past, 0) - 1;
    if (same && waits && accepted >= 0 && accepted < waiting) {
        found.warm = true;
        found.observed = a.row0_update ? 1 : static_cast<int32_t>(accepted) + 1;
    }
    return found;
}

}  // namespace spin
