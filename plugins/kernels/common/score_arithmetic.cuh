// SPDX-License-Identifier: Apache-2.0
//
// How score_slots multiplies keys with query heads: three ways behind one interface.
//
// A warp owns 16 slots (rows g and g + 8 of a fragment for the threads of quad g = lane / 4; the
// caller chooses which slots these are) and multiplies them with all heads of one query row
// (columns 2t and 2t + 1 of each group of eight heads, for the thread t = lane % 4 of a quad). Keys
// come from registers, the query from shared memory.
//
// A dot product does not care about the order of its 128 dimensions, as long as both operands
// agree. So thread t loads whole 16-byte pieces t and t + 4 of its keys and feeds them to the
// tensor cores as they lie; store_query() puts the query's dimensions where that order wants them.
// Word i of piece t + 4j thereby meets step 4j + i of the f16 instructions (k = 16), or half of
// step 2j + i / 2 of the fp8 instructions (k = 32).

#pragma once

#include <cstdint>

#include "score_ptx.cuh"

namespace spin::score {

constexpr int kKeyDim = 128;

// A thread's share of a warp's keys, as loaded: [row g or g + 8][piece t or t + 4].
using KeyPieces = uint4[2][2];

__device__ __forceinline__ uint32_t word(const uint4& piece, int i) {
    return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

// Products of a row's heads, as the tensor cores leave them: [head / 8][2 * (row g + 8) + head %
// 2].
template <int kHeads>
using Products = float[kHeads / 8][4];

// Keys widened to f16: the multiplicands of eight k = 16 steps.
struct WidenedKeys {
    uint32_t step[8][4];

    __device__ __forceinline__ explicit WidenedKeys(const KeyPieces& pieces) {
#pragma unroll
        for (int s = 0; s < 8; ++s) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const uint2 four = widen(word(pieces[row][s / 4], s % 4));
                step[s][row] = four.x;
                step[s][2 + row] = four.y;
            }
        }
    }
};

// Keys as they are: the multiplicands of four k = 32 steps.
struct PlainKeys {
    uint32_t step[4][4];

    __device__ __forceinline__ explicit PlainKeys(const KeyPieces& pieces) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                step[s][row] = word(pieces[row][s / 2], s % 2 * 2);
                step[s][2 + row] = word(pieces[row][s / 2], s % 2 * 2 + 1);
            }
        }
    }
};

// Warp-level f16 instructions of every architecture. The query lies in the order in which lanes
// want it: 16 bytes for a lane, a group of eight heads and a pair of steps.
template <int kHeads>
struct PortableArithmetic {
    using Keys = WidenedKeys;
    static constexpr int kHeadsAtOnce = 8;
    static constexpr int kQueryRowBytes = kHeads * kKeyDim * 2;

    static __device__ __forceinline__ void store_query(uint8_t* row, int head, int piece,
                                                       const uint4& value) {
        const int lane = head % 8 * 4 + piece % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int step = piece / 4 * 4 + i;
            uint8_t* to = row + ((head / 8 * 4 + step / 2) * 32 + lane) * 16 + step % 2 * 8;
            *reinterpret_cast<uint2*>(to) = widen(word(value, i));
        }
    }

    static __device__ __forceinline__ void multiply(Products<8>& products, const Keys& keys,
                                                    const uint8_t* query_row, int group) {
        const uint4* query =
            reinterpret_cast<const uint4*>(query_row) + group * 4 * 32 + threadIdx.x % 32;
        float (&sums)[4] = products[0];
        sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const uint4 heads = query[pair * 32];
            multiply_step(sums, keys.step[2 * pair], heads.x, heads.y);
            multiply_step(sums, keys.step[2 * pair + 1], heads.z, heads.w);
        }
    }

private:
    static __device__ __forceinline__ void multiply_step(float (&sums)[4],
                                                         const uint32_t (&keys)[4], uint32_t heads0,
                                                         uint32_t heads1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(keys[0]), "r"(keys[1]), "r"(keys[2]), "r"(keys[3]), "r"(heads0), "r"(heads1));
    }
};

}  // namespace spin::score
