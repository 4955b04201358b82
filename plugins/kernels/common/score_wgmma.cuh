// SPDX-License-Identifier: Apache-2.0
//
// Hopper's warpgroup instructions for score_slots: f16 (exact) and fp8 (fast). See
// score_arithmetic.cuh for the interface.
//
// The query of a row lies in shared memory as the instructions read it fastest: head h is 128 bytes
// (two such halves for f16), and its 16-byte piece c is stored at piece c ^ (h % 8).

#pragma once

#include <cstdint>

#include "score_arithmetic.cuh"

namespace spin::score {

// What the tensor cores need to know of a matrix of 128-byte rows: its address in units of 16
// bytes, 1024 bytes from one group of eight rows to the next, and the swizzle of 128 bytes. Later
// steps of a row's 128 bytes only add to the address.
__device__ __forceinline__ uint64_t describe_rows(const uint8_t* matrix) {
    constexpr uint64_t kGroupStride = 1024 / 16, kSwizzle128 = 1;
    return (kSwizzle128 << 62) | (kGroupStride << 32) | (uint64_t{1} << 16) |
           ((shared_address(matrix) & 0x3FFFF) / 16);
}

// One step: adds keys (from registers) times heads (from shared memory) to the products, or starts
// the products afresh. Instructions exist for sm_90a alone; elsewhere nothing launches this code.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define SPIN_PRODUCTS_4(g) \
    "+f"(products[g][0]), "+f"(products[g][1]), "+f"(products[g][2]), "+f"(products[g][3])
#define SPIN_PRODUCTS_16 \
    SPIN_PRODUCTS_4(0), SPIN_PRODUCTS_4(1), SPIN_PRODUCTS_4(2), SPIN_PRODUCTS_4(3)
#define SPIN_PRODUCTS_32 \
    SPIN_PRODUCTS_16, SPIN_PRODUCTS_4(4), SPIN_PRODUCTS_4(5), SPIN_PRODUCTS_4(6), SPIN_PRODUCTS_4(7)

#define SPIN_WGMMA_32(shape, types, transposes)                                     \
    asm volatile(                                                                   \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                            \
        "wgmma.mma_async.sync.aligned.m64n32" shape ".f32" types                    \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
        "{%16, %17, %18, %19}, %20, add, 1, 1" transposes ";\n}"                    \
        : SPIN_PRODUCTS_16                                                          \
        : "r"(keys[0]), "r"(keys[1]), "r"(keys[2]), "r"(keys[3]), "l"(heads), "n"(kAdd))

#define SPIN_WGMMA_64(shape, types, transposes)                                             \
    asm volatile(                                                                           \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                    \
        "wgmma.mma_async.sync.aligned.m64n64" shape ".f32" types                            \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
        "{%32, %33, %34, %35}, %36, add, 1, 1" transposes ";\n}"                            \
        : SPIN_PRODUCTS_32                                                                  \
        : "r"(keys[0]), "r"(keys[1]), "r"(keys[2]), "r"(keys[3]), "l"(heads), "n"(kAdd))

template <bool kAdd, int kHeads>
__device__ __forceinline__ void multiply_step_f16(Products<kHeads>& products,
                                                  const uint32_t (&keys)[4], uint64_t heads) {
    if constexpr (kHeads == 32) {
        SPIN_WGMMA_32("k16", ".f16.f16", ", 0");
    } else {
        SPIN_WGMMA_64("k16", ".f16.f16", ", 0");
    }
}

template <bool kAdd, int kHeads>
__device__ __forceinline__ void multiply_step_fp8(Products<kHeads>& products,
                                                  const uint32_t (&keys)[4], uint64_t heads) {
    if constexpr (kHeads == 32) {
        SPIN_WGMMA_32("k32", ".e4m3.e4m3", "");
    } else {
        SPIN_WGMMA_64("k32", ".e4m3.e4m3", "");
    }
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Waits for all steps. The empty statements keep the compiler from reading products earlier. No
// other work is put between the steps and the wait, although the tensor cores run in the
// background: they read keys from registers as they go, and the compiler was seen to reuse those
// registers too early.
template <int kHeads>
__device__ __forceinline__ void end_products(Products<kHeads>& products) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int group = 0; group < kHeads / 8; ++group) {
        asm volatile("" : SPIN_PRODUCTS_4(group)::"memory");
    }
}

#undef SPIN_PRODUCTS_4
#undef SPIN_PRODUCTS_16
#undef SPIN_PRODUCTS_32
#undef SPIN_WGMMA_32
#undef SPIN_WGMMA_64

#else

template <bool kAdd, int kHeads>
__device__ void multiply_step_f16(Products<kHeads>&, const uint32_t (&)[4], uint64_t) {
    __trap();
}
template <bool kAdd, int kHeads>
__device__ void multiply_step_fp8(Products<kHeads>&, const uint32_t (&)[4], uint64_t) {
    __trap();
}
__device__ __forceinline__ void begin_products() {}
template <int kHeads>
__device__ __forceinline__ void end_products(Products<kHeads>&) {}

#endif

// Exact: f16 products of widened keys. A row's 128 dimensions are two halves of 128 bytes.
template <int kHeads>
struct ExactArithmetic {
    using Keys = WidenedKeys;
    static constexpr int kHeadsAtOnce = kHeads;
    static constexpr int kHalfBytes = kHeads * 128;
    static constexpr int kQueryRowBytes = 2 * kHalfBytes;

    static __device__ __forceinline__ void store_query(uint8_t* row, int head, int piece,
                                                       const uint4& value) {
        uint8_t* to = row + piece / 4 * kHalfBytes + head * 128 + piece % 4 * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint2 four = widen(word(value, i));
            const int low = (2 * i) ^ (head % 8), high = (2 * i + 1) ^ (head % 8);
            *reinterpret_cast<uint32_t*>(to + low * 16) = four.x;
            *reinterpret_cast<uint32_t*>(to + high * 16) = four.y;
        }
    }

    static __device__ __forceinline__ void multiply(Products<kHeads>& products, const Keys& keys,
                                                    const uint8_t* query_row, int /*group*/) {
        const uint64_t heads = describe_rows(query_row);
        begin_products();
        multiply_step_f16<false, kHeads>(products, keys.step[0], heads);
#pragma unroll
        for (int s = 1; s < 8; ++s) {
            const int offset = s / 4 * kHalfBytes + s % 4 * 32;
            multiply_step_f16<true, kHeads>(products, keys.step[s], heads + offset / 16);
        }
        end_products<kHeads>(products);
    }
};

// Fast: fp8 products of the keys as they are.
template <int kHeads>
struct FastArithmetic {
    using Keys = PlainKeys;
    static constexpr int kHeadsAtOnce = kHeads;
    static constexpr int kQueryRowBytes = kHeads * 128;

    static __device__ __forceinline__ void store_query(uint8_t* row, int head, int piece,
                                                       const uint4& value) {
        uint8_t* to = row + head * 128 + piece % 4 * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int swizzled = (piece / 4 * 4 + i) ^ (head % 8);
            *reinterpret_cast<uint32_t*>(to + swizzled * 16) = word(value, i);
        }
    }

    static __device__ __forceinline__ void multiply(Products<kHeads>& products, const Keys& keys,
                                                    const uint8_t* query_row, int /*group*/) {
        const uint64_t heads = describe_rows(query_row);
        begin_products();
        multiply_step_fp8<false, kHeads>(products, keys.step[0], heads);
#pragma unroll
        for (int s = 1; s < 4; ++s) {
            multiply_step_fp8<true, kHeads>(products, keys.step[s], heads + s * 2);
        }
        end_products<kHeads>(products);
    }
};

}  // namespace spin::score
