// SPDX-License-Identifier: Apache-2.0
// spin_quantize_query: a warp a row and head, four dimensions a thread.
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device.cuh"
#include "spin/quantize_query.h"
#include "status.h"

namespace spin {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kKeyDim = 128, kEach = kKeyDim / 32;
constexpr float kLargest = 448.0f;  // of e4m3

__device__ __forceinline__ float widen(__half x) {
    return __half2float(x);
}
__device__ __forceinline__ float widen(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

// Exponent of the power of two at or above a positive normal number.
__device__ __forceinline__ int exponent_above(float x) {
    const int bits = __float_as_int(x);
    return (bits >> 23) - 127 + ((bits & 0x7fffff) != 0);
}

__device__ __forceinline__ float power_of_two(int exponent) {
    return __int_as_float((exponent + 127) << 23);
}

template <typename Query>
__global__ void __launch_bounds__(kThreads) quantize(const SpinQuantizeQueryParams p) {
    wait_for_inputs();
    const int lane = threadIdx.x % 32;
    const int64_t head = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (head >= p.heads_total) {
        return;
    }
    const int64_t place = head * kKeyDim + lane * kEach;
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const Query*>(p.query) + place);
    const Query* const four = reinterpret_cast<const Query*>(&raw);
    float x[kEach], most = 1e-12f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        x[i] = widen(four[i]);
        most = is_finite(x[i]) ? fmaxf(most, fabsf(x[i])) : most;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
    }
    const int exponent = exponent_above(__fmul_rn(most, 1.0f / kLargest));
    const float inverse = power_of_two(-exponent);
    const auto pair = [&](int i) {
        const float2 scaled = make_float2(x[i] * inverse, x[i + 1] * inverse);
        return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3));
    };
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.query_out) + place) = pair(0) | pair(2)
                                                                                             << 16;
    if (lane == 0) {
        p.weights_out[head] = p.weights[head] * power_of_two(exponent);
    }
}

}  // namespace
}  // namespace spin

extern "C" int spin_quantize_query(const SpinQuantizeQueryParams* p, cudaStream_t stream) {
    using namespace spin;
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, heads_total, 0, int64_t{1} << 32);
    if (p->heads_total == 0) {
        return SPIN_OK;
    }
    SPIN_CHECK_POINTER(p, query, 8);
    SPIN_CHECK_POINTER(p, weights, 4);
    SPIN_CHECK_POINTER(p, query_out, 4);
    SPIN_CHECK_POINTER(p, weights_out, 4);
    SPIN_CHECK_RANGE(p, query_dtype, SPIN_QUERY_F16, SPIN_QUERY_BF16);
    const dim3 grid(static_cast<unsigned>((p->heads_total + kWarps - 1) / kWarps));
    return p->query_dtype == SPIN_QUERY_F16
               ? launch(quantize<__half>, grid, kThreads, 0, 1, stream, *p)
               : launch(quantize<__nv_bfloat16>, grid, kThreads, 0, 1, stream, *p);
}
