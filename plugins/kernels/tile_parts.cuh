// SPDX-License-Identifier: Apache-2.0
// Steps of the pass over V and D (tiles.cuh), for one warp and one tile.
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
    const int64_t* observed_positions;  // of the rows to observe: [.., rows]
    const float* scores;
    const int32_t* compact_of_block;
    const int64_t* accepted;  // observe_scores only
    // advance only: this step, the books, and what it finds
    const int64_t* positions;  // [sequences, rows]
    const int64_t* tenants;
    const int64_t* lane_tenant;
    const int64_t* lane_slots;
    const uint8_t* lane_waits;
    const uint8_t* lane_warm;
    const int64_t* lane_next;
    int64_t* places;
    uint8_t* warm;
    int32_t* observed_rows;
    float* block_scores;
    int64_t slots, v_stride, v_layer_stride, d_stride, d_layer_stride, tile_stride, score_stride;
    int64_t lane_stride, lanes_total;
    int32_t entries, sequences, rows, blocks, tiles, ratio, block_size, block_shift;
    int32_t full_rows, row0_update;
    float decay, gain;
};

// Uniform facts about the rows of one entry, in shared memory. Slots fit 32 bits.
struct RowFacts {
    int32_t query[kMaxRows], visible[kMaxRows];  // visible: -1 for a padding row

    // Clamped: a position past the capacity must not lead out of the buffers.
    __device__ __forceinline__ void note(int r, int64_t position, int32_t ratio, int64_t slots) {
        query[r] = static_cast<int>(min(query_slot(position, ratio), slots));
        visible[r] =
            position < 0 ? -1 : static_cast<int>(min(visible_slots(position, ratio), slots));
    }
};

// Eight new contributions gain * score of a group of slots; NaN where there is nothing to observe.
// The gain is in (0, 1], so that the product is finite exactly where the score is.
template <bool kCompact, typename State>
__device__ __forceinline__ void load_gains(const TileArgs<State>& a, const float* row, int place,
                                           int slot, int visible, float (&y)[kGroup]) {
    if (place < 0) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            y[j] = not_a_number();
        }
        return;
    }
    const bool full = !kCompact && a.full_rows;
    const int column = full ? slot : (place << a.block_shift) + (slot & (a.block_size - 1));
    const float4* from = reinterpret_cast<const float4*>(row + static_cast<uint32_t>(column));
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

// The same without shared memory, for one row: y of slot `kFirst - j` of the lane's own group,
// where negative ones lie in the group of the lane below. Lane 0's is `carry` of lane 31: the tile
// before.
template <int kFirst>
__device__ __forceinline__ void mirror_at(const float (&y)[kGroup], const float (&carry)[kGroup],
                                          int lane, float (&out)[kGroup]) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        if (j <= kFirst) {
            out[j] = y[kFirst - j];
        } else {
            const float mine = lane == 31 ? carry[kGroup + kFirst - j] : y[kGroup + kFirst - j];
            out[j] = __shfl_sync(0xffffffffu, mine, (lane + 31) & 31);
        }
    }
}

__device__ __forceinline__ void mirror(const float (&y)[kGroup], const float (&carry)[kGroup],
                                       int lane, int first, float (&out)[kGroup]) {
    switch (first) {
        case 0:
            mirror_at<0>(y, carry, lane, out);
            break;
        case 1:
            mirror_at<1>(y, carry, lane, out);
            break;
        case 2:
            mirror_at<2>(y, carry, lane, out);
            break;
        case 3:
            mirror_at<3>(y, carry, lane, out);
            break;
        case 4:
            mirror_at<4>(y, carry, lane, out);
            break;
        case 5:
            mirror_at<5>(y, carry, lane, out);
            break;
        case 6:
            mirror_at<6>(y, carry, lane, out);
            break;
        case 7:
            mirror_at<7>(y, carry, lane, out);
            break;
        default:
            mirror_at<-1>(y, carry, lane, out);
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
template <typename State, bool kOneRow>
__device__ __forceinline__ void pool_row(const Chunk<State>& v, const Chunk<State>& d,
                                         const typename Chunk<State>::Split& split, int block_shift,
                                         int tile, int lane, int last_query, int query, int visible,
                                         float* out) {
    const int slot = (tile * kTileGroups + lane) * kGroup;
    const int chunk = (last_query >> 3) - (tile * kTileGroups + lane);
    GroupBest best;
    if ((tile + 1) * SPIN_ADVANCE_TILE_SLOTS <= min(visible, query)) {
        best.vertical = v.best();
        d.split_best(split, best.here, best.below);
    } else {
        best = best_checked(v, d, slot, chunk, query, visible);
    }
    // Offsets 8c + j with j <= query % 8 sit in group query / 8 - c, the others one below; lane t's
    // chunk therefore touches the groups of lanes t - shift and t - shift - 1.
    const int shift = kOneRow ? 0 : (last_query >> 3) - (query >> 3);  // 0 or 1
    const float here = kOneRow ? best.here : __shfl_down_sync(0xffffffffu, best.here, shift);
    const float below = __shfl_down_sync(0xffffffffu, best.below, shift + 1);
    float most = best.vertical;
    most = lane + shift < 32 ? fmaxf(most, here) : most;
    most = lane + shift + 1 < 32 ? fmaxf(most, below) : most;
    const int lanes_shift = block_shift - 3;
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
    float one = best.below, two = minus_infinity();
    if (!kOneRow) {
        const float next_below = __shfl_down_sync(0xffffffffu, best.below, 1);
        one = shift ? fmaxf(best.here, next_below) : best.below;
        two = shift ? best.below : minus_infinity();
    }
    if (lane == 0) {
        const bool apart = lanes_a_block == 1;
        *reinterpret_cast<float2*>(out) =
            make_float2(apart ? two : minus_infinity(), apart ? one : fmaxf(one, two));
    }
}

}  // namespace spin
