// SPDX-License-Identifier: Apache-2.0
// CUDA as `launch` of the kernels' status.h sees it: two devices, and what their kernels may have.
#include <map>
#include <utility>

#include "status.h"

#define DEVICE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSharedBytes[] = {227 * 1024, 99 * 1024};
constexpr int kKernels = 40;

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::map<std::pair<int, const void*>, int> allowed;
int asked, permissions, attempts;

cudaError_t give(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

// Only its address counts: the n-th kernel.
template <int n>
void kernel(int) {
    volatile int number = n;
    (void)number;
}

template <int... n>
int launch_one(int which, size_t shared_bytes, std::integer_sequence<int, n...>) {
    using Kernel = void(int);
    static Kernel* const kernels[] = {kernel<n>...};
    return spin::launch(kernels[which], dim3(1), 32, shared_bytes, 1, nullptr, 7);
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* id) {
    *id = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int id) {
    ++asked;
    *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? kSharedBytes[id] : 9;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int bytes) {
    ++permissions;
    if (bytes > kSharedBytes[device])
        return give(cudaErrorInvalidValue);
    allowed[{device, function}] = bytes;
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
    ++attempts;
    const auto found = allowed.find({device, function});
    const int most = found == allowed.end() ? 48 * 1024 : found->second;
    const bool fits = config->dynamicSmemBytes <= static_cast<size_t>(most);
    return give(fits ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaGetLastError() {
    return std::exchange(last_error, cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t) {
    return "an error";
}

}  // extern "C"

DEVICE_EXPORT int device_launch(int which, int shared_bytes) {
    return launch_one(which, static_cast<size_t>(shared_bytes),
                      std::make_integer_sequence<int, kKernels>());
}
DEVICE_EXPORT void device_set(int id) {
    device = id;
}
// What cudaDeviceReset does to the kernels' permissions.
DEVICE_EXPORT void device_reset() {
    allowed.clear();
}
DEVICE_EXPORT int device_shared_bytes() {
    spin::Device found = {};
    return spin::current_device(&found) == cudaSuccess ? found.shared_bytes : -1;
}
DEVICE_EXPORT int device_take_error() {
    return cudaGetLastError();
}
// Since the last call: attributes asked for, permissions, launches tried; then nothing is known.
DEVICE_EXPORT void device_counts(int* counts) {
    counts[0] = std::exchange(asked, 0);
    counts[1] = std::exchange(permissions, 0);
    counts[2] = std::exchange(attempts, 0);
}
