// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "layer_ids.h"

namespace spin::trt {
namespace {

struct Numbers {
    int64_t at[kMaxLayers];
};

constexpr Numbers count_up() {
    Numbers numbers = {};
    for (int i = 0; i < kMaxLayers; ++i) {
        numbers.at[i] = i;
    }
    return numbers;
}

__device__ const Numbers device_numbers = count_up();

}  // namespace

const int64_t* layer_id(int64_t layer) noexcept {
    void* address = nullptr;
    if (cudaGetSymbolAddress(&address, device_numbers) != cudaSuccess) {
        (void)cudaGetLastError();
        return nullptr;
    }
    return static_cast<const Numbers*>(address)->at + layer;
}

}  // namespace spin::trt
