// SPDX-License-Identifier: Apache-2.0
// The pass over V and D that spin_observe_scores and spin_advance share.
//
// A warp owns a tile of 256 slots of V and, mirrored at the last query slot Q, the 256 offsets of D
// that pair with it: lane t holds the eight slots of group g = tile * 32 + t and the eight offsets
// of chunk c = Q / 8 - g. Both are aligned, so V and D move in 16-byte accesses and every element
// has exactly one owner, however D lies relative to V. What the misalignment costs is kept on the
// side of the scores, which are only read: they go through shared memory with three groups from
// below the tile (rows of a draft and of the one before it are at most 15 slots apart).
//
// Warps never wait for each other: the pass lives on loads in flight.
#pragma once

#include "device.cuh"
#include "spin/advance.h"

namespace spin {

constexpr int kTileThreads = 128;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kTileGroups = SPIN_ADVANCE_TILE_SLOTS / kGroup;
constexpr int kHalo = 3;
constexpr int kPitch = kGroup + 1;  // one word of padding a group: no bank conflicts
static_assert(kTileGroups == 32, "a warp a tile");

template <typename State>
struct TileArgs {
    State* v;
    State* d;
    const int64_t* lanes;
    const int64_t* positions;           // this step: [sequences, rows]
    const int64_t* observed_positions;  // of the rows to observe: [.., rows]
    const float* scores;
    const int32_t* compact_of_block;
    const uint8_t* warm;
    const int32_t* observed_rows;
    const int32_t* previous_entry;
    const int64_t* accepted;  // observe_scores only
    float* block_scores;
    int64_t slots, v_stride, d_stride, score_stride, lane_stride;
    int32_t entries, sequences, rows, blocks, tiles, ratio, block_size, block_shift;
    int32_t full_rows, row0_update;
    float decay, gain;
};

// Uniform facts about the rows of one entry, in shared memory. Slots fit 32 bits.
struct RowFacts {
    int32_t query[kMaxRows], visible[kMaxRows];
};

// Eight new contributions gain * score of a group of slots; NaN where there is nothing to observe.
// The gain is in (0, 1], so that the product is finite exactly where the score is.
template <typename State>
__device__ __forceinline__ void load_gains(const TileArgs<State>& a, const float* row, int place,
                                           int slot, int visible, float (&y)[kGroup]) {
    if (place < 0) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            y[j] = not_a_number();
        }
        return;
    }
    const int column = a.full_rows ? slot : (place << a.block_shift) + (slot & (a.block_size - 1));
    const float4* from = reinterpret_cast<const float4*>(row + column);
    const float4 low = __ldcs(from), high = __ldcs(from + 1);
    y[0] = low.x, y[1] = low.y, y[2] = low.z, y[3] = low.w;
    y[4] = high.x, y[5] = high.y, y[6] = high.z, y[7] = high.w;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        y[j] = __fmul_rn(y[j], a.gain);
    }
    if (slot + kGroup > visible) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            if (slot + j >= visible) {
                y[j] = not_a_number();
            }
        }
    }
}

// Place of a group's block among the scored ones; -1: not scored, or not visible.
__device__ __forceinline__ int group_place(const int32_t* compact, int shift, int slot,
                                           int visible) {
    return slot >= 0 && slot < visible ? compact[slot >> shift] : -1;
}

// y[j] = the padded word j places before `from`'s. `within` is from's place in its group: beyond it
// the words of the next lower group start, one word of padding further.
template <int kWithin>
__device__ __forceinline__ void read_mirrored_at(const float* from, float (&y)[kGroup]) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        y[j] = from[-j - (j > kWithin ? 1 : 0)];
    }
}

// `within` is uniform, so that one jump saves an address computation an element.
__device__ __forceinline__ void read_mirrored(const float* from, int within, float (&y)[kGroup]) {
    switch (within) {
        case 0:
            read_mirrored_at<0>(from, y);
            break;
        case 1:
            read_mirrored_at<1>(from, y);
            break;
        case 2:
            read_mirrored_at<2>(from, y);
            break;
        case 3:
            read_mirrored_at<3>(from, y);
            break;
        case 4:
            read_mirrored_at<4>(from, y);
            break;
        case 5:
            read_mirrored_at<5>(from, y);
            break;
        case 6:
            read_mirrored_at<6>(from, y);
            break;
        default:
            read_mirrored_at<7>(from, y);
            break;
    }
}

// What a tile adds to the groups around it, of one row: the best of V in the lane's own group, and
// of D in the group where the lane's chunk starts and in the one below.
struct GroupBest {
    float vertical, here, below;
};

// Rows at the end of the tile, or of the sequence: every element is checked.
template <typename State>
__device__ __forceinline__ GroupBest best_checked(const Chunk<State>& v, const Chunk<State>& d,
                                                  int slot, int chunk, int query, int visible) {
    GroupBest best = {minus_infinity(), minus_infinity(), minus_infinity()};
    float x[kGroup];
    v.unpack(x);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        best.vertical = slot + j < visible ? fmaxf(best.vertical, x[j]) : best.vertical;
    }
    d.unpack(x);
    if (chunk >= 0) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            // The row's own slot may not be built yet.
            if (j == 0 && chunk == 0 && query >= visible) {
                continue;
            }
            if (j <= (query & 7)) {
                best.here = fmaxf(best.here, x[j]);
            } else {
                best.below = fmaxf(best.below, x[j]);
            }
        }
    }
    return best;
}

// Partial block scores of one row from this tile.
template <typename State>
__device__ __forceinline__ void pool_row(const Chunk<State>& v, const Chunk<State>& d,
                                         int block_size, int tile, int lane, int last_query,
                                         int query, int visible, float* out) {
    const int slot = (tile * kTileGroups + lane) * kGroup;
    const int chunk = (last_query >> 3) - (tile * kTileGroups + lane);
    GroupBest best;
    if ((tile + 1) * SPIN_ADVANCE_TILE_SLOTS <= min(visible, query)) {
        best.vertical = v.best();
        d.split_best(query & 7, best.here, best.below);
    } else {
        best = best_checked(v, d, slot, chunk, query, visible);
    }
    // Offsets 8c + j with j <= query % 8 sit in group query / 8 - c, the others one below; lane t's
    // chunk therefore touches the groups of lanes t - shift and t - shift - 1.
    const int shift = (last_query >> 3) - (query >> 3);  // 0 or 1
    const float here = __shfl_down_sync(0xffffffffu, best.here, shift);
    const float below = __shfl_down_sync(0xffffffffu, best.below, shift + 1);
    float most = best.vertical;
    most = lane + shift < 32 ? fmaxf(most, here) : most;
    most = lane + shift + 1 < 32 ? fmaxf(most, below) : most;
    const int lanes_shift = __ffs(block_size / kGroup) - 1;
    const int lanes_a_block = 1 << lanes_shift;
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
        if (step < lanes_a_block) {
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
        }
    }
    if ((lane & (lanes_a_block - 1)) == 0) {
        out[2 + (lane >> lanes_shift)] = most;
    }
    // What falls below the tile: with a shift, lane 0 one and two groups below and lane 1 one.
    const float next_below = __shfl_down_sync(0xffffffffu, best.below, 1);
    if (lane == 0) {
        const float one = shift ? fmaxf(best.here, next_below) : best.below;
        const float two = shift ? best.below : minus_infinity();
        const bool apart = lanes_a_block == 1;
        out[0] = apart ? two : minus_infinity();
        out[1] = apart ? one : fmaxf(one, two);
    }
}

// kRows: 1 compiles the row loops away, 0 takes them from the arguments.
template <typename State, bool kAdvance, int kRows>
__global__ void __launch_bounds__(kTileThreads, kRows != 1           ? 3
                                                : sizeof(State) == 2 ? 5
                                                                     : 4)
    update_tiles(const TileArgs<State> a) {
    __shared__ float buffers[kTileWarps][(kTileGroups + kHalo) * kPitch];
    __shared__ RowFacts now, before;
    wait_for_inputs();
    const int t = threadIdx.x;
    const int rows = kRows ? kRows : a.rows;
    const uint32_t e = blockIdx.x;
    const uint32_t s = e % static_cast<uint32_t>(a.sequences);
    const int64_t home = entry_lane(a.lanes, a.lane_stride, a.sequences, e);
    if (home < 0) {
        return;
    }
    State* v_row = a.v + home * a.v_stride;
    State* d_row = a.d + home * a.d_stride;
    if (kAdvance && !a.warm[e]) {
        // Cold: nothing of an earlier life may be left, whatever this one's length.
        Chunk<State> zero;
        zero.clear();
        const int64_t step = static_cast<int64_t>(gridDim.y) * kTileThreads * kGroup;
        const int64_t first = (static_cast<int64_t>(blockIdx.y) * kTileThreads + t) * kGroup;
        for (int64_t i = first; i < a.v_stride; i += step) {
            zero.store(v_row + i);
        }
        for (int64_t i = first; i < a.d_stride; i += step) {
            zero.store(d_row + i);
        }
        return;
    }
    const int64_t source = kAdvance ? a.previous_entry[e] : e;
    int learned = 0;
    if (kAdvance) {
        learned = a.observed_rows[e];
    } else {
        const int64_t accepted = a.accepted[e];
        if (accepted >= 0) {
            learned = a.row0_update ? 1 : static_cast<int>(min(accepted, int64_t{rows - 1})) + 1;
        }
        if (learned == 0) {
            return;
        }
    }
    if (t < rows) {
        // Clamped: a position past the capacity must not lead out of the buffers.
        const int64_t mine = kAdvance ? a.positions[static_cast<int64_t>(s) * rows + t] : -1;
        now.query[t] = static_cast<int>(min(query_slot(mine, a.ratio), a.slots));
        now.visible[t] =
            mine < 0 ? -1 : static_cast<int>(min(visible_slots(mine, a.ratio), a.slots));
        if (t < learned) {
            const int64_t past = a.observed_positions[source * rows + t];
            before.query[t] = static_cast<int>(min(query_slot(past, a.ratio), a.slots));
            before.visible[t] = static_cast<int>(min(visible_slots(past, a.ratio), a.slots));
        }
    }
    __syncthreads();
    int predicted = 0, last_query = 0;  // Q; rows ascend, but padding rows have no place
    if (kAdvance) {
        while (predicted < rows && now.visible[predicted] >= 0) {
            ++predicted;
        }
        last_query = now.query[predicted - 1];
    } else {
        for (int r = 0; r < learned; ++r) {
            last_query = max(last_query, before.query[r]);
        }
    }
    const int warp = t >> 5, lane = t & 31;
    float* buffer = buffers[warp];
    const int32_t* compact = learned ? a.compact_of_block + source * a.blocks : nullptr;
    const float* scores = a.scores + source * rows * a.score_stride;
    const int v_groups = static_cast<int>(a.v_stride / kGroup);
    const int d_chunks = static_cast<int>(a.d_stride / kGroup);
    const int last_tile = min(last_query / SPIN_ADVANCE_TILE_SLOTS, a.tiles - 1);
    const int width = SPIN_ADVANCE_TILE_SLOTS / a.block_size + 2;
    // Neighbouring tiles go to one warp: it finds the scores below a tile where it left them.
    const int warps = static_cast<int>(gridDim.y) * kTileWarps;
    const int each = (last_tile + warps) / warps;
    const int first_tile = (static_cast<int>(blockIdx.y) * kTileWarps + warp) * each;
    const int end_tile = min(first_tile + each, last_tile + 1);
    float* out = a.block_scores + (static_cast<int64_t>(e) * rows * a.tiles + first_tile) * width;
    // With one row its facts stay in registers; with more they are read where needed.
    const int only_query = before.query[0], only_visible = learned ? before.visible[0] : 0;
    const int only_now = now.query[0], only_now_visible = now.visible[0];
    int ahead = -1;  // place of the next tile's block in row 0: one load off the chain
    if (first_tile < end_tile) {
        ahead = group_place(compact, a.block_shift, (first_tile * kTileGroups + lane) * kGroup,
                            only_visible);
    }
    for (int tile = first_tile; tile < end_tile; ++tile, out += width) {
        const int group = tile * kTileGroups + lane, slot = group * kGroup;
        const int chunk = (last_query >> 3) - group;
        const bool in_d = static_cast<uint32_t>(chunk) < static_cast<uint32_t>(d_chunks);
        const bool in_v = chunk >= 0 && group < v_groups;
        Chunk<State> v, d;
        v.clear();
        d.clear();
        if (in_v) {
            v.load(v_row + slot);
        }
        if (in_d) {
            d.load(d_row + chunk * kGroup);
        }
        const int first_place = ahead;
        if (tile + 1 < end_tile) {
            ahead =
                group_place(compact, a.block_shift, slot + SPIN_ADVANCE_TILE_SLOTS, only_visible);
        }
        bool v_moved = false, d_moved = false;  // unchanged averages are not written back
        for (int r = 0; r < (kRows ? min(learned, kRows) : learned); ++r) {
            const int visible = kRows == 1 ? only_visible : before.visible[r];
            const int query = kRows == 1 ? only_query : before.query[r];
            if (visible <= 0) {
                continue;  // a padding row has no place to be compared with
            }
            const float* row = scores + r * a.score_stride;
            float y[kGroup];
            const int place =
                r == 0 ? first_place : group_place(compact, a.block_shift, slot, visible);
            load_gains(a, row, place, slot, visible, y);
            if (kRows == 1 && tile > first_tile) {
                const float kept = lane < kHalo * kPitch ? buffer[kTileGroups * kPitch + lane] : 0;
                __syncwarp();
                if (lane < kHalo * kPitch) {
                    buffer[lane] = kept;
                }
            } else if (lane < kHalo) {
                const int low = slot - kHalo * kGroup;
                float halo[kGroup];
                load_gains(a, row, group_place(compact, a.block_shift, low, visible), low, visible,
                           halo);
#pragma unroll
                for (int j = 0; j < kGroup; ++j) {
                    buffer[lane * kPitch + j] = halo[j];
                }
            }
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                buffer[(lane + kHalo) * kPitch + j] = y[j];
            }
            v_moved |= v.learn(y, a.decay);
            __syncwarp();
            // Offset 8c + j of this row is slot query - 8c - j, counted from the halo's start.
            const int start = query - (last_query & ~7) + kHalo * kGroup;
            read_mirrored(buffer + lane * kPitch + start + (start >> 3), start & 7, y);
            d_moved |= d.learn(y, a.decay);
            __syncwarp();  // the next row or tile reuses the buffer
        }
        if (in_v && v_moved) {
            v.store(v_row + slot);
        }
        if (in_d && d_moved) {
            d.store(d_row + chunk * kGroup);
        }
        if constexpr (kAdvance) {
            for (int r = 0; r < (kRows ? min(predicted, kRows) : predicted); ++r) {
                pool_row(v, d, a.block_size, tile, lane, last_query,
                         kRows == 1 ? only_now : now.query[r],
                         kRows == 1 ? only_now_visible : now.visible[r],
                         out + static_cast<int64_t>(r) * a.tiles * width);
            }
        }
    }
}

// Thread blocks an entry gets: enough to fill the device, no more than there are tiles.
inline unsigned tile_workers(int32_t entries, int32_t tiles) {
    constexpr int64_t kWanted = 132 * 9 * 2;
    const int64_t most = (tiles + kTileWarps - 1) / kTileWarps;
    const int64_t each = (kWanted + entries - 1) / entries;
    return static_cast<unsigned>(each < 1 ? 1 : each > most ? most : each);
}

}  // namespace spin
