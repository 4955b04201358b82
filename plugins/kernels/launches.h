// SPDX-License-Identifier: Apache-2.0
// Where the launches of a thread go.
#pragma once

#include <cuda_runtime_api.h>

namespace spin {

// Takes launches in the place of the CUDA runtime.
class Launcher {
public:
    virtual cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                               void** arguments) = 0;

protected:
    ~Launcher() = default;
};

// Sends what this thread launches to `launcher`; null: to the runtime. Returns the one before.
Launcher* exchange_launcher(Launcher* launcher) noexcept;

}  // namespace spin
