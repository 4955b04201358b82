// SPDX-License-Identifier: Apache-2.0
// Device helpers shared by the stems.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace spin {

constexpr int kMaxRows = 8;
constexpr int kGroup = 8;  // slots handled by one thread at a time; divides every block size

// Pairs with the launch attribute of `launch`: nothing written by earlier kernels is read before.
// The kernel after this one may start at once; it waits in turn for all of this one.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void prefetch(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ float minus_infinity() {
    return __int_as_float(0xff800000);
}
__device__ __forceinline__ float not_a_number() {
    return __int_as_float(0x7fffffff);
}

// False for NaN and both infinities: what must never enter the averages.
__device__ __forceinline__ bool is_finite(float x) {
    return fabsf(x) <= __int_as_float(0x7f7fffff);
}

// Token positions have 64 bits but seldom need them, and a long division takes its time.
__device__ __forceinline__ int64_t divide(int64_t positive, int32_t by) {
    return positive >> 32 == 0 ? static_cast<uint32_t>(positive) / static_cast<uint32_t>(by)
                               : positive / by;
}

// SPEC 1: N(p) and q(p). A padding row (-1) sees nothing; its query slot is never used.
__device__ __forceinline__ int64_t visible_slots(int64_t position, int32_t ratio) {
    return position < 0 ? 0 : divide(position + 1, ratio);
}
__device__ __forceinline__ int64_t query_slot(int64_t position, int32_t ratio) {
    return position < 0 ? 0 : divide(position, ratio);
}

// The lane of entry e; -1 for none, or for one that no layer has: it would be a lane of the next.
__device__ __forceinline__ int64_t entry_lane(const int64_t* lanes, int64_t lane_stride,
                                              int32_t sequences, int64_t e) {
    const uint32_t entry = static_cast<uint32_t>(e), each = static_cast<uint32_t>(sequences);
    const int64_t lane = lanes[entry % each];
    return lane < 0 || lane >= lane_stride ? -1 : lane + entry / each * lane_stride;
}

// Unsigned integers in the order of the floats. -0.0 equals 0.0 and NaN equals -inf.
__device__ __forceinline__ uint32_t ordered_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return x != x ? 0x007fffffu : key;
}
constexpr uint32_t kKeyOfMinusInfinity = 0x007fffffu;

__device__ __forceinline__ float float_of_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Launch bounds were measured on Hopper; elsewhere the same registers do not always suffice.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kFewerBlocks = 1;
#else
constexpr int kFewerBlocks = 0;
#endif

// Eight consecutive averages as floats, from and to their storage.
template <typename State>
struct Chunk;

// A state learns from y = gain * score: decay * state + y, products and sum each rounded, since a
// fused multiply-add would give other bits (SPEC 5). What is not finite leaves no trace.
__device__ __forceinline__ float average(float state, float y, float decay) {
    return is_finite(y) ? __fadd_rn(__fmul_rn(state, decay), y) : state;
}

template <>
struct Chunk<__nv_bfloat16> {
    uint32_t words[4];

    __device__ __forceinline__ void load(const __nv_bfloat16* p) {
        const uint4 raw = *reinterpret_cast<const uint4*>(p);
        words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
    }
    __device__ __forceinline__ void store(__nv_bfloat16* p) const {
        *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __device__ __forceinline__ void clear() { words[0] = words[1] = words[2] = words[3] = 0; }
    __device__ __forceinline__ void unpack(float (&x)[kGroup]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    // Stored to the nearest, ties to even, after each row (SPEC 5). An untouched state survives
    // the way through fp32 unchanged. True if any bit moved.
    __device__ __forceinline__ bool learn(const float (&y)[kGroup], float decay) {
        float x[kGroup];
        unpack(x);
        uint32_t moved = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(
                average(x[2 * i], y[2 * i], decay), average(x[2 * i + 1], y[2 * i + 1], decay));
            const uint32_t word = *reinterpret_cast<const uint32_t*>(&pair);
            moved |= word ^ words[i];
            words[i] = word;
        }
        return moved != 0;
    }
    static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
        const __nv_bfloat162 m = __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
        return *reinterpret_cast<const uint32_t*>(&m);
    }
    static __device__ __forceinline__ float best_of(const uint32_t (&w)[4]) {
        const uint32_t m = larger(larger(w[0], w[1]), larger(w[2], w[3]));
        return fmaxf(__uint_as_float(m << 16), __uint_as_float(m & 0xffff0000u));
    }
    __device__ __forceinline__ float best() const { return best_of(words); }
    // Where elements 0 .. k end and the others begin; k is uniform.
    struct Split {
        uint32_t masks[4];

        __device__ __forceinline__ explicit Split(int k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                masks[i] = k >= 2 * i + 1 ? 0xffffffffu : k == 2 * i ? 0x0000ffffu : 0u;
            }
        }
    };
    // Best of the elements of either side; -inf for none.
    __device__ __forceinline__ void split_best(const Split& at, float& low, float& high) const {
        constexpr uint32_t kLowest = 0xff80ff80u;  // two times -inf
        uint32_t first[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            first[i] = (words[i] & at.masks[i]) | (kLowest & ~at.masks[i]);
            rest[i] = (words[i] & ~at.masks[i]) | (kLowest & at.masks[i]);
        }
        low = best_of(first);
        high = best_of(rest);
    }
};

template <>
struct Chunk<float> {
    float x[kGroup];

    __device__ __forceinline__ void load(const float* p) {
        const float4 low = reinterpret_cast<const float4*>(p)[0];
        const float4 high = reinterpret_cast<const float4*>(p)[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
    __device__ __forceinline__ void store(float* p) const {
        reinterpret_cast<float4*>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
        reinterpret_cast<float4*>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            x[j] = 0.0f;
        }
    }
    __device__ __forceinline__ void unpack(float (&out)[kGroup]) const {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            out[j] = x[j];
        }
    }
    __device__ __forceinline__ bool learn(const float (&y)[kGroup], float decay) {
        uint32_t moved = 0;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            const float next = average(x[j], y[j], decay);
            moved |= __float_as_uint(next) ^ __float_as_uint(x[j]);
            x[j] = next;
        }
        return moved != 0;
    }
    __device__ __forceinline__ float best() const {
        float most = x[0];
#pragma unroll
        for (int j = 1; j < kGroup; ++j) {
            most = fmaxf(most, x[j]);
        }
        return most;
    }
    struct Split {
        int k;

        __device__ __forceinline__ explicit Split(int last) : k(last) {}
    };
    __device__ __forceinline__ void split_best(const Split& at, float& low, float& high) const {
        low = high = minus_infinity();
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            low = j <= at.k ? fmaxf(low, x[j]) : low;
            high = j <= at.k ? high : fmaxf(high, x[j]);
        }
    }
};

}  // namespace spin
