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

#include "resolve.cuh"

namespace spin {

// Thread blocks a multiprocessor: as many as registers allow without spilling.
template <typename State, int kRows>
constexpr int kTileBlocks = kRows != 1           ? 5
                            : sizeof(State) == 2 ? 8
                                                 : 6;

// kRows: 1 compiles the row loops away, 0 takes them from the arguments.
template <typename State, bool kAdvance, int kRows>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<State, kRows> - kFewerBlocks)
    update_tiles(const TileArgs<State> a) {
    __shared__ float buffers[kRows == 1 ? 1 : kTileWarps][(kTileGroups + kHalo) * kPitch];
    __shared__ RowFacts now, before;
    __shared__ Standing standing;
    __shared__ float held_decay;
    wait_for_inputs();
    const int t = threadIdx.x;
    const int rows = kRows ? kRows : a.rows;
    const uint32_t e = blockIdx.x;
    if (kAdvance && t < 32) {
        int64_t position, past;
        const Standing found = resolve(a, e, rows, position, past);
        if (t < rows) {
            now.note(t, position, a.ratio, a.slots);
            before.note(t, past, a.ratio, a.slots);
        }
        if (t == 0) {
            standing = found;
            if (blockIdx.y == 0) {
                a.places[e] = found.place;
                a.warm[e] = found.warm;
                a.observed_rows[e] = found.observed;
            }
        }
    }
    if (!kAdvance && t < rows) {
        const int64_t past = a.observed_positions[static_cast<int64_t>(e) * rows + t];
        before.note(t, past, a.ratio, a.slots);
        if (t == 0) {
            const int64_t accepted = min(a.accepted[e], int64_t{rows - 1});
            const int observed = accepted < 0    ? 0
                                 : a.row0_update ? 1
                                                 : static_cast<int>(accepted) + 1;
            standing = {a.lanes[e], observed, true};
        }
    }
    if (t == 0) {
        held_decay = a.decay;
    }
    __syncthreads();
    const int64_t home = standing.place;
    const int learned = standing.observed;
    if (home < 0 || home >= a.lanes_total || (!kAdvance && learned == 0)) {
        return;
    }
    // Groups of eight that the capacity needs; the last one of each may be padded.
    const int v_groups = static_cast<int>((a.slots + kGroup - 1) / kGroup);
    const int d_chunks = static_cast<int>(a.slots / kGroup + 1);
    State* v_row = a.v;
    State* d_row = a.d;
    int lane_groups = d_chunks;  // those that have memory
    if constexpr (kAdvance) {
        const uint32_t each = static_cast<uint32_t>(a.lane_stride);
        const uint32_t layer = static_cast<uint32_t>(home) / each;
        const uint32_t own = static_cast<uint32_t>(home) % each;
        v_row += own * a.v_stride + layer * a.v_layer_stride;
        d_row += own * a.d_stride + layer * a.d_layer_stride;
        if (a.lane_slots != nullptr) {
            lane_groups = static_cast<int>(min(a.lane_slots[own] / kGroup, int64_t{d_chunks}));
        }
    } else {
        v_row += home * a.v_stride;
        d_row += home * a.d_stride;
    }
    if (!standing.warm) {
        // Cold: nothing of an earlier life may be left, whatever this one's length.
        Chunk<State> zero;
        zero.clear();
        const int step = static_cast<int>(gridDim.y) * kTileThreads;
        for (int g = static_cast<int>(blockIdx.y) * kTileThreads + t; g < lane_groups; g += step) {
            const int64_t at = g / kTileGroups * a.tile_stride + g % kTileGroups * kGroup;
            if (g < v_groups) {
                zero.store(v_row + at);
            }
            zero.store(d_row + at);
        }
        return;
    }
    const int64_t source = kAdvance ? home : e;
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
    float* buffer = buffers[kRows == 1 ? 0 : warp];
    const int32_t* compact = learned ? a.compact_of_block + source * a.blocks : nullptr;
    const float* scores = a.scores + source * rows * a.score_stride;
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
    float carry[kGroup];  // y of the group below the tile, in lane 31
    if (kRows == 1 && learned > 0 && first_tile < end_tile && lane == 31) {
        const int below = (first_tile * kTileGroups - 1) * kGroup;
        load_gains<kAdvance>(a, scores, group_place(compact, a.block_shift, below, only_visible),
                             below, only_visible, carry);
    }
    // Going up in V is going down in D, by whole tiles in both.
    const int first_chunk = (last_query >> 3) - (first_tile * kTileGroups + lane);
    // Offsets in bytes have 32 bits, which saves a lane half of its address arithmetic.
    const uint32_t tile_bytes = static_cast<uint32_t>(a.tile_stride) * sizeof(State);
    const auto at = [](State* row, uint32_t bytes) {
        return reinterpret_cast<State*>(reinterpret_cast<char*>(row) + bytes);
    };
    uint32_t v_at = first_tile * tile_bytes + lane * kGroup * sizeof(State);
    uint32_t d_at = (first_chunk >> 5) * tile_bytes + (first_chunk & 31) * kGroup * sizeof(State);
    // Its uses are predicated: as a parameter it would be fetched again for each of them.
    const float decay = *static_cast<volatile float*>(&held_decay);
    const typename Chunk<State>::Split only_split(only_now & 7);
    for (int tile = first_tile; tile < end_tile;
         ++tile, out += width, v_at += tile_bytes, d_at -= tile_bytes) {
        const int group = tile * kTileGroups + lane, slot = group * kGroup;
        const int chunk = (last_query >> 3) - group;
        const bool in_d = static_cast<uint32_t>(chunk) < static_cast<uint32_t>(d_chunks);
        const bool in_v = chunk >= 0 && group < v_groups;
        Chunk<State> v, d;
        v.clear();
        d.clear();
        if (in_v) {
            v.load(at(v_row, v_at));
        }
        if (in_d) {
            d.load(at(d_row, d_at));
        }
        const int first_place = ahead;
        if (tile + 1 < end_tile) {
            ahead =
                group_place(compact, a.block_shift, slot + SPIN_ADVANCE_TILE_SLOTS, only_visible);
        }
        if (kRows == 1 && tile + 1 < end_tile) {  // the next tile's lines set out already
            if (group + kTileGroups < v_groups) {
                prefetch(at(v_row, v_at + tile_bytes));
            }
            if (chunk >= kTileGroups) {
                prefetch(at(d_row, d_at - tile_bytes));
            }
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
            load_gains<kAdvance>(a, row, place, slot, visible, y);
            v_moved |= v.learn(y, decay);
            // Offset 8c + j of this row is slot query - 8c - j.
            if constexpr (kRows == 1) {
                float mirrored[kGroup];
                mirror(y, carry, lane, query - (last_query & ~7), mirrored);
#pragma unroll
                for (int j = 0; j < kGroup; ++j) {
                    carry[j] = y[j];
                }
                d_moved |= d.learn(mirrored, decay);
                continue;
            }
            if (lane < kHalo) {
                const int low = slot - kHalo * kGroup;
                float halo[kGroup];
                load_gains<kAdvance>(a, row, group_place(compact, a.block_shift, low, visible), low,
                                     visible, halo);
#pragma unroll
                for (int j = 0; j < kGroup; ++j) {
                    buffer[lane * kPitch + j] = halo[j];
                }
            }
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                buffer[(lane + kHalo) * kPitch + j] = y[j];
            }
            __syncwarp();
            // Rows that are no draft may be further apart, and must not lead out of the buffer.
            const int start =
                min(max(query - (last_query & ~7), -2 * kGroup), kGroup - 1) + kHalo * kGroup;
            read_mirrored(buffer + lane * kPitch + start + (start >> 3), start & 7, y);
            d_moved |= d.learn(y, decay);
            __syncwarp();  // the next row or tile reuses the buffer
        }
        if (in_v && v_moved) {
            v.store(at(v_row, v_at));
        }
        if (in_d && d_moved) {
            d.store(at(d_row, d_at));
        }
        if constexpr (kAdvance) {
            for (int r = 0; r < (kRows ? min(predicted, kRows) : predicted); ++r) {
                const int query = kRows == 1 ? only_now : now.query[r];
                const typename Chunk<State>::Split split =
                    kRows == 1 ? only_split : typename Chunk<State>::Split(query & 7);
                pool_row<State, kRows == 1>(v, d, split, a.block_shift, tile, lane, last_query,
                                            query, kRows == 1 ? only_now_visible : now.visible[r],
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
