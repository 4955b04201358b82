// SPDX-License-Identifier: Apache-2.0
//
// The few instructions of sm_90 and later that score_slots needs and CUDA C++ does not spell.

#pragma once

#include <cstdint>

namespace spin::score {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Programmatic dependent launch. Nothing that an earlier kernel wrote may be read, and nothing that
// it reads may be written, before wait_for_earlier_kernels().
__device__ __forceinline__ void wait_for_earlier_kernels() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_later_kernels_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Shared memory barriers. A phase ends when all expected arrivals and all expected bytes are in;
// waiting for the parity of the phase before the first returns at once.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}
__device__ __forceinline__ bool is_complete(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}

// Asynchronous copy from global to shared memory, both 16-byte aligned, counted by `barrier`.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// Makes this thread's ordinary stores to shared memory visible to the tensor cores' own reads.
__device__ __forceinline__ void publish_to_tensor_cores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Loads from shared memory by address, in program order with the barriers above.
__device__ __forceinline__ void load_shared(uint4& value, uint32_t address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_shared(float& value, uint32_t address) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(int& value, uint32_t address) {
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
}

// Hides how values came about, so that the compiler keeps them instead of computing them anew in
// every round of a loop.
template <class... Values>
__device__ __forceinline__ void keep_in_registers(Values&... values) {
    (..., ([&] { asm volatile("" : "+r"(values)); }()));
}

// Four e4m3 values to four f16 values: exact, as f16 has more of both exponent and mantissa.
__device__ __forceinline__ uint2 widen(uint32_t four_e4m3) {
    uint2 four_f16;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(four_f16.x), "=r"(four_f16.y)
        : "r"(four_e4m3));
    return four_f16;
}

}  // namespace spin::score
