// SPDX-License-Identifier: Apache-2.0
// spin_version and spin_error_string; what is asked of a device once; where launches go.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "launches.h"
#include "status.h"

namespace spin {
namespace {

thread_local int last_status = SPIN_OK;
thread_local char last_text[256] = "";

// What a thread has asked of the device `id`. Its own, so that there is nothing to lock, and
// nothing to destroy when it ends.
struct Known {
    int id;  // -1: nothing yet
    Device device;
    const void* allowed[32];  // kernels; any beyond these are allowed anew each time
    int kernels;
};
thread_local Known known = {-1, {}, {}, 0};

thread_local Launcher* launcher = nullptr;

cudaError_t ask(int id) {
    Device device = {};
    int major = 0, minor = 0;
    cudaError_t error = cudaSuccess;
    const auto get = [&](int* value, cudaDeviceAttr attribute) {
        if (error == cudaSuccess)
            error = cudaDeviceGetAttribute(value, attribute, id);
    };
    get(&major, cudaDevAttrComputeCapabilityMajor);
    get(&minor, cudaDevAttrComputeCapabilityMinor);
    get(&device.multiprocessors, cudaDevAttrMultiProcessorCount);
    get(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    device.compute_capability = 10 * major + minor;
    if (error == cudaSuccess)
        known = {id, device, {}, 0};
    return error;
}

}  // namespace

cudaError_t current_device(Device* device) {
    int id = 0;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess && id != known.id)
        error = ask(id);
    *device = known.device;
    return error;
}

cudaError_t allow_shared_bytes(const void* kernel) {
    Device device = {};
    cudaError_t error = current_device(&device);
    const void** const end = known.allowed + known.kernels;
    if (error != cudaSuccess || std::find(known.allowed, end, kernel) != end)
        return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 device.shared_bytes);
    if (error == cudaSuccess && end != std::end(known.allowed))
        known.allowed[known.kernels++] = kernel;
    return error;
}

bool forget_device() {
    const bool anything = known.id >= 0;
    known.id = -1;
    return anything;
}

Launcher* exchange_launcher(Launcher* other) noexcept {
    return std::exchange(launcher, other);
}

cudaError_t issue(const cudaLaunchConfig_t& config, const void* kernel, void** arguments) {
    return launcher != nullptr ? launcher->launch(config, kernel, arguments)
                               : cudaLaunchKernelExC(&config, kernel, arguments);
}

int fail(int status, const char* field, const char* allowed) {
    last_status = status;
    std::snprintf(last_text, sizeof(last_text), "%s: %s%s", field,
                  status == SPIN_ERROR_CUDA ? "" : "allowed: ", allowed);
    return status;
}

}  // namespace spin

extern "C" int spin_version(void) {
    return SPIN_VERSION;
}

extern "C" const char* spin_error_string(int status) {
    if (status != SPIN_OK && status == spin::last_status)
        return spin::last_text;
    switch (status) {
        case SPIN_OK:
            return "ok";
        case SPIN_ERROR_NULL:
            return "a required pointer is null";
        case SPIN_ERROR_RANGE:
            return "a number is outside its range";
        case SPIN_ERROR_ALIGNMENT:
            return "a pointer or stride is not aligned";
        case SPIN_ERROR_UNSUPPORTED:
            return "a value that this library does not support";
        case SPIN_ERROR_CUDA:
            return "the CUDA runtime refused the launch";
        default:
            return "unknown status";
    }
}
