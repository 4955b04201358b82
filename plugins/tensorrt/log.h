// SPDX-License-Identifier: Apache-2.0
// What a node refuses goes to TensorRT's logger, one line each.
#pragma once

#include <NvInferRuntime.h>

namespace spin::trt {

// Where TensorRT says its loggers are; null takes them back.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// One error line, to stderr while TensorRT has named no logger. Returns false.
[[gnu::format(printf, 1, 2)]] bool refuse(const char* format, ...) noexcept;

}  // namespace spin::trt
