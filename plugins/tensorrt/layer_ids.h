// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace spin::trt {

constexpr int kMaxLayers = 1024;

// Device address of the number `layer` on the current device; null without one. select_blocks reads
// its layers from there, and a copy in every step would be one more launch.
const int64_t* layer_id(int64_t layer) noexcept;

}  // namespace spin::trt
