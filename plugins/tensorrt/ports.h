// SPDX-License-Identifier: Apache-2.0
// The tensors of a node: data types and shapes as data, from which everything TensorRT asks about
// them is answered.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

#include "fields.h"

namespace spin::trt {

// What a dimension means. Its value is what the fields say, or whatever the first input that has it
// brings; all tensors of a node agree on it.
enum Symbol : uint8_t {
    kSequences,
    kRows,
    kHeads,
    kKeyDim,
    kPages,
    kPageBytes,
    kTableWidth,
    kLanes,
    kVWidth,
    kDWidth,
    kPlaces,
    kScoreWidth,
    kBlocks,
    kBookRows,
    kTopK,
    kCompactPages,
    kSymbols
};

constexpr int kMaxRank = 4;
constexpr int kMaxPorts = 12;

constexpr unsigned bit_of(nvinfer1::DataType type) {
    return 1u << static_cast<unsigned>(type);
}

struct Port {
    const char* name;
    unsigned types;  // bits of the data types
    int rank;
    Symbol dims[kMaxRank];
    int type_of = -1;   // the input whose data type this one has
    int alias_of = -1;  // outputs: the input that is written in place
};

struct Ports {
    const Port* inputs;
    const Port* outputs;
    int inputs_count;
    int outputs_count;
};

// Sizes of a call, and the data types of its inputs.
struct Layout {
    int64_t size[kSymbols];
    nvinfer1::DataType type[kMaxPorts];

    int64_t operator[](Symbol symbol) const { return size[symbol]; }
    // Elements of an input or output.
    int64_t volume(const Port& port) const;
};

int64_t bytes_of(nvinfer1::DataType type);

// Whether a tensor's data type is one the node takes, after those of the inputs before it.
bool has_type(const Port& port, nvinfer1::DataType type, nvinfer1::DataType of_input);

// The size of a symbol that the fields decide, or -1.
int64_t fixed_size(Symbol symbol, const Config& config);

// Checks inputs and outputs and fills the layout. False, with a line in the log, for tensors that
// the node cannot take. `name` is the node's.
bool check_ports(const char* name, const Ports& ports, const Config& config,
                 const nvinfer1::PluginTensorDesc* inputs,
                 const nvinfer1::PluginTensorDesc* outputs, Layout& layout) noexcept;

}  // namespace spin::trt
