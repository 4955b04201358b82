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

// SPEC 1: N(p) and q(p). A padding row (-1) sees nothing; its query slot is never used.
__device__ __forceinline__ int64_t visible_slots(int64_t position, int32_t ratio) {
    return position < 0 ? 0 : (position + 1) / ratio;
}
__device__ __forceinline__ int64_t query_slot(int64_t position, int32_t ratio) {
    return position < 0 ? 0 : position / ratio;
}

// The lane of entry e, or -1.
__device__ __forceinline__ int64_t entry_lane(const int64_t* lanes, int64_t lane_stride,
                                              int32_t sequences, int64_t e) {
    const int64_t lane = lanes[e % sequences];
    return lane < 0 ? -1 : lane + e / sequences * lane_stride;
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

// Eight consecutive averages as floats, from and to their storage.
template <typename State>
struct Chunk;

template <>
struct Chunk<__nv_bfloat16> {
    uint4 raw;
    __device__ void load(const __nv_bfloat16* p) { raw = *reinterpret_cast<const uint4*>(p); }
    __device__ void store(__nv_bfloat16* p) const { *reinterpret_cast<uint4*>(p) = raw; }
    __device__ void clear() { raw = make_uint4(0, 0, 0, 0); }
    __device__ void unpack(float (&x)[kGroup]) const {
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    __device__ void pack(const float (&x)[kGroup]) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
            words[i] = *reinterpret_cast<const uint32_t*>(&pair);
        }
        raw = make_uint4(words[0], words[1], words[2], words[3]);
    }
    // Storage precision after each row (SPEC 5): nearest, ties to even.
    static __device__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
};

template <>
struct Chunk<float> {
    float4 low, high;
    __device__ void load(const float* p) {
        low = reinterpret_cast<const float4*>(p)[0];
        high = reinterpret_cast<const float4*>(p)[1];
    }
    __device__ void store(float* p) const {
        reinterpret_cast<float4*>(p)[0] = low;
        reinterpret_cast<float4*>(p)[1] = high;
    }
    __device__ void clear() { low = high = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
    __device__ void unpack(float (&x)[kGroup]) const {
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
    __device__ void pack(const float (&x)[kGroup]) {
        low = make_float4(x[0], x[1], x[2], x[3]);
        high = make_float4(x[4], x[5], x[6], x[7]);
    }
    static __device__ float rounded(float x) { return x; }
};

// Two products and a sum, each rounded: a fused multiply-add would give other bits (SPEC 5).
__device__ __forceinline__ float average(float state, float z, float decay, float gain) {
    return __fadd_rn(__fmul_rn(state, decay), __fmul_rn(z, gain));
}

}  // namespace spin
