// SPDX-License-Identifier: Apache-2.0
// The pass over V and D that spin_observe_scores and spin_advance share.
//
// A block of threads owns a tile of 2048 slots of V and, mirrored at the last query slot Q, the
// 2048 offsets of D that pair with it: thread t holds the eight slots of group g = tile * 256 + t
// and the eight offsets of chunk c = Q / 8 - g. Both are aligned, so V and D move in 16-byte
// accesses and every element has exactly one owner, however D lies relative to V. What the
// misalignment costs is kept on the side of the scores, which are only read: they go through
// shared memory with a halo of three groups below and one above the tile (rows of one draft and of
// the one before it are at most 15 slots apart).
#pragma once

#include "device.cuh"
#include "spin/advance.h"

namespace spin {

constexpr int kTileThreads = SPIN_ADVANCE_TILE_SLOTS / kGroup;
constexpr int kHaloLow = 3, kHaloHigh = 1;
constexpr int kPitch = kGroup + 1;  // one word of padding a group keeps shared reads free of
                                    // bank conflicts

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
    int64_t v_stride, d_stride, score_stride, lane_stride;
    int32_t entries, sequences, rows, blocks, tiles, ratio, block_size, block_shift;
    int32_t full_rows, row0_update;
    int64_t slots;
    float decay, gain;
};

// Uniform facts about the rows of one entry, in shared memory.
struct RowFacts {
    int64_t query[kMaxRows], visible[kMaxRows];
};

// Eight scores of a group of slots, NaN where there is nothing to observe.
template <typename State>
__device__ __forceinline__ void load_scores(const TileArgs<State>& a, const float* row,
                                            const int32_t* compact, int64_t group, int64_t visible,
                                            float (&z)[kGroup]) {
    const int64_t slot = group * kGroup;
    int32_t place = -1;
    if (group >= 0 && slot < visible)
        place = compact[slot >> a.block_shift];
    if (place < 0) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
            z[j] = not_a_number();
        return;
    }
    const int64_t within = slot & (a.block_size - 1);
    const int64_t column =
        a.full_rows ? slot : (static_cast<int64_t>(place) << a.block_shift) + within;
    const float4* from = reinterpret_cast<const float4*>(row + column);
    const float4 low = from[0], high = from[1];
    z[0] = low.x, z[1] = low.y, z[2] = low.z, z[3] = low.w;
    z[4] = high.x, z[5] = high.y, z[6] = high.z, z[7] = high.w;
    if (slot + kGroup > visible) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
            if (slot + j >= visible)
                z[j] = not_a_number();
    }
}

// Applies finite scores to a chunk; true if any was.
template <typename State, typename Score>
__device__ __forceinline__ bool learn(float (&x)[kGroup], Score score, float decay, float gain) {
    bool touched = false;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        const float z = score(j);
        if (is_finite(z)) {
            x[j] = Chunk<State>::rounded(average(x[j], z, decay, gain));
            touched = true;
        }
    }
    return touched;
}

// Partial block scores of one row from this tile. `edge` are two rows of shared memory, 260 words
// each, for what D's chunks add to the groups around the tile (index 2 = the tile's first group).
template <typename State>
__device__ __forceinline__ void pool_row(const TileArgs<State>& a, const float (&v)[kGroup],
                                         const float (&d)[kGroup], int64_t tile, int64_t chunk,
                                         int64_t last_query, int64_t query, int64_t visible,
                                         float* lower, float* upper, float* out) {
    const int t = threadIdx.x;
    const int64_t slot = (tile * kTileThreads + t) * kGroup;
    float vertical = minus_infinity();
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
        if (slot + j < visible)
            vertical = fmaxf(vertical, v[j]);
    // Offsets 8c + j with j <= k sit in group query / 8 - c, the others one group below.
    const int k = static_cast<int>(query & (kGroup - 1));
    float here = minus_infinity(), below = minus_infinity();
    if (chunk >= 0) {
        const bool hides_first = chunk == 0 && query >= visible;  // the row's own slot is not built
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            if (j == 0 && hides_first)
                continue;
            if (j <= k) {
                here = fmaxf(here, d[j]);
            } else {
                below = fmaxf(below, d[j]);
            }
        }
    }
    const int shift = static_cast<int>((last_query >> 3) - (query >> 3));  // 0 or 1
    upper[t - shift + 2] = here;
    lower[t - shift + 1] = below;
    if (t == 0) {
        upper[0] = minus_infinity();
        (shift ? upper[kTileThreads + 1] : upper[1]) = minus_infinity();
        (shift ? lower[kTileThreads] : lower[0]) = minus_infinity();
        lower[kTileThreads + 1] = minus_infinity();
    }
    __syncthreads();
    float best = fmaxf(vertical, fmaxf(upper[t + 2], lower[t + 2]));
    const int lanes_a_block = a.block_size / kGroup;
    for (int step = 1; step < lanes_a_block; step *= 2)
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, step));
    if ((t & (lanes_a_block - 1)) == 0)
        out[2 + t / lanes_a_block] = best;
    if (t == 0) {
        const float one_below = fmaxf(upper[1], lower[1]), two_below = fmaxf(upper[0], lower[0]);
        const bool apart = lanes_a_block == 1;
        out[0] = apart ? two_below : minus_infinity();
        out[1] = apart ? one_below : fmaxf(one_below, two_below);
    }
}

template <typename State, bool kAdvance>
__global__ void __launch_bounds__(kTileThreads) update_tiles(const TileArgs<State> a) {
    __shared__ float scores[(kTileThreads + kHaloLow + kHaloHigh) * kPitch];
    __shared__ float edges[2][2][kTileThreads + 4];
    __shared__ RowFacts now, before;
    wait_for_inputs();
    const int t = threadIdx.x;
    const int64_t e = blockIdx.x;
    const int64_t lane = entry_lane(a.lanes, a.lane_stride, a.sequences, e);
    if (lane < 0)
        return;
    State* v_row = a.v + lane * a.v_stride;
    State* d_row = a.d + lane * a.d_stride;
    if (kAdvance && !a.warm[e]) {
        // Cold: nothing of an earlier life may be left, whatever this one's length.
        Chunk<State> zero;
        zero.clear();
        const int64_t step = static_cast<int64_t>(gridDim.y) * kTileThreads * kGroup;
        const int64_t first = (static_cast<int64_t>(blockIdx.y) * kTileThreads + t) * kGroup;
        for (int64_t i = first; i < a.v_stride; i += step)
            zero.store(v_row + i);
        for (int64_t i = first; i < a.d_stride; i += step)
            zero.store(d_row + i);
        return;
    }
    const int64_t source = kAdvance ? a.previous_entry[e] : e;
    int learned = 0;
    if (kAdvance) {
        learned = a.observed_rows[e];
    } else {
        const int64_t accepted = a.accepted[e];
        if (accepted >= 0)
            learned = a.row0_update ? 1 : static_cast<int>(min(accepted, int64_t{a.rows - 1})) + 1;
        if (learned == 0)
            return;
    }
    if (t < a.rows) {
        const int64_t mine = kAdvance ? a.positions[e % a.sequences * a.rows + t] : -1;
        now.query[t] = query_slot(mine, a.ratio);
        // Clamped: a position past the capacity must not lead out of the buffers.
        now.visible[t] = mine < 0 ? -1 : min(visible_slots(mine, a.ratio), a.slots);
        if (t < learned) {
            const int64_t past = a.observed_positions[source * a.rows + t];
            before.query[t] = query_slot(past, a.ratio);
            before.visible[t] = min(visible_slots(past, a.ratio), a.slots);
        }
    }
    __syncthreads();
    int predicted = 0;
    if (kAdvance)
        while (predicted < a.rows && now.visible[predicted] >= 0)
            ++predicted;
    int64_t last_query = 0;  // Q; rows ascend, but a padding row among the learned ones has none
    for (int r = 0; r < learned; ++r)
        last_query = max(last_query, before.query[r]);
    if (kAdvance)
        last_query = now.query[predicted - 1];
    const int32_t* compact = learned ? a.compact_of_block + source * a.blocks : nullptr;
    const int64_t last_tile = min(last_query / SPIN_ADVANCE_TILE_SLOTS, int64_t{a.tiles - 1});
    const int64_t row_width = SPIN_ADVANCE_TILE_SLOTS / a.block_size + 2;
    int parity = 0;
    for (int64_t tile = blockIdx.y; tile <= last_tile; tile += gridDim.y) {
        const int64_t group = tile * kTileThreads + t, chunk = (last_query >> 3) - group;
        const bool in_v = group * kGroup < a.v_stride,
                   in_d = chunk >= 0 && (chunk + 1) * kGroup <= a.d_stride;
        Chunk<State> v_chunk, d_chunk;
        v_chunk.clear();
        d_chunk.clear();
        if (in_v && in_d)
            v_chunk.load(v_row + group * kGroup);
        if (in_d)
            d_chunk.load(d_row + chunk * kGroup);
        float v[kGroup], d[kGroup];
        v_chunk.unpack(v);
        d_chunk.unpack(d);
        bool v_touched = false, d_touched = false;
        for (int r = 0; r < learned; ++r) {
            const float* row = a.scores + (source * a.rows + r) * a.score_stride;
            const int64_t visible = before.visible[r];
            if (visible <= 0)
                continue;  // a padding row has no place to be compared with
            float z[kGroup];
            load_scores(a, row, compact, group, visible, z);
            if (t < kHaloLow + kHaloHigh) {
                float halo[kGroup];
                const int place = t < kHaloLow ? t : t + kTileThreads;
                load_scores(a, row, compact, tile * kTileThreads + place - kHaloLow, visible, halo);
#pragma unroll
                for (int j = 0; j < kGroup; ++j)
                    scores[place * kPitch + j] = halo[j];
            }
#pragma unroll
            for (int j = 0; j < kGroup; ++j)
                scores[(t + kHaloLow) * kPitch + j] = z[j];
            v_touched |= learn<State>(v, [&](int j) { return z[j]; }, a.decay, a.gain);
            __syncthreads();
            // Offset 8c + j of this row is slot query - 8c - j, counted from the halo's start.
            const int first =
                static_cast<int>(before.query[r] - (last_query & ~int64_t{7})) + kHaloLow * kGroup;
            if (in_d) {
                d_touched |= learn<State>(
                    d,
                    [&](int j) {
                        const int at = first - j;
                        return scores[(t + (at >> 3)) * kPitch + (at & 7)];
                    },
                    a.decay, a.gain);
            }
            __syncthreads();  // the next row or tile reuses the buffer
        }
        if (v_touched) {
            v_chunk.pack(v);
            v_chunk.store(v_row + group * kGroup);
        }
        if (d_touched) {
            d_chunk.pack(d);
            d_chunk.store(d_row + chunk * kGroup);
        }
        if constexpr (kAdvance) {
            for (int r = 0; r < predicted; ++r) {
                float* out = a.block_scores + ((e * a.rows + r) * a.tiles + tile) * row_width;
                // Two buffers in turn: a row may write while slower threads still read the last.
                pool_row(a, v, d, tile, chunk, last_query, now.query[r], now.visible[r],
                         edges[parity][0], edges[parity][1], out);
                parity ^= 1;
            }
        }
    }
}

// Thread blocks an entry gets: enough to fill the device, no more than there are tiles.
inline unsigned tile_workers(int32_t entries, int32_t tiles) {
    constexpr int kWanted = 132 * 8 * 4;
    const int64_t each = (kWanted + entries - 1) / entries;
    return static_cast<unsigned>(each < 1 ? 1 : each > tiles ? tiles : each);
}

}  // namespace spin
