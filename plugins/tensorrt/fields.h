// SPDX-License-Identifier: Apache-2.0
// A node's constants: what they may be, how they are read, and how they are written into an engine.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

namespace spin::trt {

// A set of nodes.
enum NodeBit : unsigned {
    kIndexer = 1,
    kPredictBlocks = 2,
    kSparseIndexer = 4,
    kObserve = 8,
};

// Values of the fields; those that a node does not have keep their defaults and are not read.
struct Config {
    int64_t ratio = 0;
    int64_t slots = 0;
    int64_t top_k = 0;
    int64_t layer = 0;
    int64_t block_size = 64;
    int64_t page_slots = 64;
    int64_t sparsity_ppm = 400000;
    int64_t exploration_ppm = 50000;
    int64_t seed = 0;  // 64 bits without a sign
    int64_t pooling = 0;
    int64_t row0_mask = 0;
    int64_t row0_update = 0;
    int64_t exact = 1;
    int64_t aliased = 1;
    double ema_decay = 0.5;

    int64_t blocks() const { return (slots + block_size - 1) / block_size; }
    int64_t width() const { return blocks() * block_size; }
};

constexpr int kMaxFields = 15;

// A TensorRT collection that owns its array. With a config its fields point into that config, which
// has to outlive it; without one they carry names and types only.
class FieldList {
public:
    FieldList(NodeBit node, const Config* config) noexcept;
    FieldList(const FieldList&) = delete;
    FieldList& operator=(const FieldList&) = delete;

    const nvinfer1::PluginFieldCollection* get() const noexcept { return &collection_; }

private:
    nvinfer1::PluginField fields_[kMaxFields];
    nvinfer1::PluginFieldCollection collection_;
};

// Reads what a user, a parser or an engine gave. False, with a line in the log that starts with
// `name`, for a field that is unknown, missing, repeated, of a wrong type or length, or out of
// range.
bool read_fields(const char* name, NodeBit node, const nvinfer1::PluginFieldCollection* given,
                 Config& config) noexcept;

}  // namespace spin::trt
