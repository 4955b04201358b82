// SPDX-License-Identifier: Apache-2.0
// Host side shared by every stem: argument checks that name the field, and launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "spin/common.h"

namespace spin {

// Remembers the text that spin_error_string returns for `status` in this thread.
int fail(int status, const char* field, const char* allowed);

inline bool aligned(const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

inline bool is_block_size(int32_t b) {
    return b == 8 || b == 16 || b == 32 || b == 64 || b == 128;
}

#define SPIN_CHECK_STRUCT(params)                                                               \
    do {                                                                                        \
        if ((params) == nullptr)                                                                \
            return fail(SPIN_ERROR_NULL, "params", "not null");                                 \
        if ((params)->struct_bytes != static_cast<int64_t>(sizeof(*(params))))                  \
            return fail(SPIN_ERROR_RANGE, "struct_bytes", "sizeof the params of this library"); \
    } while (0)

#define SPIN_CHECK_POINTER(params, field, bytes)                                      \
    do {                                                                              \
        if ((params)->field == nullptr)                                               \
            return fail(SPIN_ERROR_NULL, #field, "not null");                         \
        if (!aligned((params)->field, bytes))                                         \
            return fail(SPIN_ERROR_ALIGNMENT, #field, "aligned to " #bytes " bytes"); \
    } while (0)

#define SPIN_CHECK_RANGE(params, field, low, high)                    \
    do {                                                              \
        if (!((params)->field >= (low) && (params)->field <= (high))) \
            return fail(SPIN_ERROR_RANGE, #field, #low " .. " #high); \
    } while (0)

#define SPIN_CHECK(condition, status, field, allowed) \
    do {                                              \
        if (!(condition))                             \
            return fail(status, field, allowed);      \
    } while (0)

// Of entries whose lanes go on from layer to layer.
#define SPIN_CHECK_LANES(params)                                                              \
    do {                                                                                      \
        SPIN_CHECK_RANGE(params, lanes_total, 1, kMaxLanes);                                  \
        SPIN_CHECK((params)->lane_stride >= 1 &&                                              \
                       (params)->lane_stride <=                                               \
                           (params)->lanes_total / ((params)->entries / (params)->sequences), \
                   SPIN_ERROR_RANGE, "lane_stride", "1 .. lanes_total / layers");             \
    } while (0)

constexpr int64_t kMaxLanes = INT32_MAX;
constexpr int64_t kMaxSlots = int64_t{1} << 24;
constexpr int32_t kMaxEntries = 1 << 24;

inline int launched(cudaError_t error) {
    return error == cudaSuccess ? SPIN_OK
                                : fail(SPIN_ERROR_CUDA, "launch", cudaGetErrorString(error));
}

struct Device {
    int compute_capability;  // 90 for 9.0
    int multiprocessors;
    int shared_bytes;  // the most a thread block can have: 227 KB on Hopper, 99 KB on RTX Blackwell
};

// The current device. Each thread asks once, as long as it stays with one device.
cudaError_t current_device(Device* device);

// Lets a kernel without static shared memory have all of the current device's; asks likewise.
cudaError_t allow_shared_bytes(const void* kernel);

// Forgets what this thread asked. False if that was nothing.
bool forget_device();

// As cudaLaunchKernelExC, or to where the thread's launches go instead (launches.h).
cudaError_t issue(const cudaLaunchConfig_t& config, const void* kernel, void** arguments);

// Launches so that the kernel's start overlaps the end of the one before it: the kernel must call
// `wait_for_inputs` before it touches memory. `cluster` > 1 groups that many blocks along x.
template <typename... Params>
int launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, int cluster,
           cudaStream_t stream, std::common_type_t<Params>... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    void* pointers[] = {&arguments...};
    const auto attempt = [&] {
        const bool large = shared_bytes > 48 * 1024;
        const void* entry = reinterpret_cast<const void*>(kernel);
        const cudaError_t error = large ? allow_shared_bytes(entry) : cudaSuccess;
        return error == cudaSuccess ? issue(config, entry, pointers) : error;
    };
    cudaError_t error = attempt();
    // A device that was reset since has forgotten, too, what its kernels may have.
    if (error == cudaErrorInvalidValue && forget_device()) {
        (void)cudaGetLastError();
        error = attempt();
    }
    if (error != cudaSuccess)
        (void)cudaGetLastError();
    return launched(error);
}

}  // namespace spin
