// SPDX-License-Identifier: Apache-2.0
#include "ports.h"

#include "log.h"
#include "text.h"

namespace spin::trt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

constexpr const char* kNames[kSymbols] = {
    "sequences",
    "rows",
    "heads",
    "128",
    "pages",
    "page bytes",
    "table width",
    "lanes",
    "slots or more",
    "slots + 1 or more",
    "lanes + sequences or more",
    "blocks * block_size",
    "blocks",
    "rows + 3",
    "top_k",
    "blocks * block_size / page_slots",
};

struct Limits {
    int64_t low, high, multiple;
};

constexpr int64_t kMany = int64_t{1} << 24;

Limits limits_of(Symbol symbol, const Config& config) {
    const int64_t fixed = fixed_size(symbol, config);
    if (fixed >= 0) {
        return {fixed, fixed, 1};
    }
    switch (symbol) {
        case kRows:
            return {1, 8, 1};
        case kHeads:
            return {32, 64, 32};
        case kPages:
            return {0, INT32_MAX, 1};
        case kTableWidth:
            return {0, kMany / config.page_slots, 1};
        case kVWidth:
            return {config.slots, 2 * kMany, 8};
        case kDWidth:
            return {config.slots + 1, 2 * kMany, 8};
        case kLanes:
        case kPlaces:
            return {1, kMany, 1};
        case kBookRows:
            return {4, 11, 1};
        default:
            return {0, kMany, 1};
    }
}

const char* name_of(DataType type) {
    static constexpr const char* kTypes[] = {"FLOAT", "HALF", "INT8", "INT32", "BOOL",
                                             "UINT8", "FP8",  "BF16", "INT64"};
    const int number = static_cast<int>(type);
    return number >= 0 && number < 9 ? kTypes[number] : "another type";
}

void show(Text& text, DataType type, const Dims& dims) {
    text.add("%s [", name_of(type));
    const int rank = dims.nbDims < Dims::MAX_DIMS ? dims.nbDims : Dims::MAX_DIMS;
    for (int i = 0; i < rank; ++i) {
        text.add(i > 0 ? ", %lld" : "%lld", static_cast<long long>(dims.d[i]));
    }
    text.add("]");
}

// What a port would have taken, given what the ports before it have settled.
void show(Text& text, const Port& port, const Config& config, const Layout& layout) {
    bool first = true;
    for (unsigned type = 0; type < 9; ++type) {
        if ((port.types >> type & 1u) != 0) {
            text.add(first ? "%s" : ", %s", name_of(static_cast<DataType>(type)));
            first = false;
        }
    }
    text.add(" [");
    for (int i = 0; i < port.rank; ++i) {
        const Symbol symbol = port.dims[i];
        const int64_t fixed = fixed_size(symbol, config);
        const int64_t known = fixed >= 0 ? fixed : layout[symbol];
        text.add(i > 0 ? ", %s" : "%s", kNames[symbol]);
        if (known >= 0 && symbol != kKeyDim) {
            text.add(" = %lld", static_cast<long long>(known));
        }
    }
    text.add("]%s", port.type_of >= 0 ? " of the same type" : "");
}

bool fits(const Port& port, const Config& config, const PluginTensorDesc& given, Layout& layout) {
    const DataType of = port.type_of >= 0 ? layout.type[port.type_of] : given.type;
    if (given.dims.nbDims != port.rank || given.format != nvinfer1::TensorFormat::kLINEAR ||
        !has_type(port, given.type, of)) {
        return false;
    }
    for (int i = 0; i < port.rank; ++i) {
        const Symbol symbol = port.dims[i];
        const int64_t element = symbol == kPageBytes ? bytes_of(given.type) : 1;
        if (given.dims.d[i] < 0 || given.dims.d[i] > int64_t{1} << 32) {
            return false;  // before it is multiplied
        }
        const int64_t size = given.dims.d[i] * element;
        const Limits limits = limits_of(symbol, config);
        const bool agrees = layout[symbol] < 0 || layout[symbol] == size;
        if (!agrees || size < limits.low || size > limits.high || size % limits.multiple != 0) {
            return false;
        }
        layout.size[symbol] = size;
    }
    return true;
}

bool check(const char* name, const Port& port, const Config& config, const PluginTensorDesc& given,
           Layout& layout) {
    const Layout before = layout;
    if (fits(port, config, given, layout)) {
        return true;
    }
    Text got, allowed;
    show(got, given.type, given.dims);
    show(allowed, port, config, before);
    return refuse("%s: %s: got %s%s, allowed: %s", name, port.name, got.held,
                  given.format == nvinfer1::TensorFormat::kLINEAR ? "" : " not LINEAR",
                  allowed.held);
}

}  // namespace

int64_t bytes_of(DataType type) {
    switch (type) {
        case DataType::kINT64:
            return 8;
        case DataType::kFLOAT:
        case DataType::kINT32:
            return 4;
        case DataType::kHALF:
        case DataType::kBF16:
            return 2;
        default:
            return 1;
    }
}

int64_t Layout::volume(const Port& port) const {
    int64_t elements = 1;
    for (int i = 0; i < port.rank; ++i) {
        elements *= size[port.dims[i]];
    }
    return elements;
}

bool has_type(const Port& port, DataType type, DataType of_input) {
    const unsigned number = static_cast<unsigned>(type);
    return number < 32 && (port.types >> number & 1u) != 0 &&
           (port.type_of < 0 || type == of_input);
}

int64_t fixed_size(Symbol symbol, const Config& config) {
    switch (symbol) {
        case kKeyDim:
            return 128;
        case kPageBytes:
            return config.page_slots * 132;
        case kScoreWidth:
            return config.width();
        case kBlocks:
            return config.blocks();
        case kTopK:
            return config.top_k;
        case kCompactPages:
            return config.width() / config.page_slots;
        default:
            return -1;
    }
}

bool check_ports(const char* name, const Ports& ports, const Config& config,
                 const PluginTensorDesc* inputs, const PluginTensorDesc* outputs,
                 Layout& layout) noexcept {
    if (inputs == nullptr || outputs == nullptr) {
        return refuse("%s: tensors: got null, allowed: descriptions", name);
    }
    for (int64_t& size : layout.size) {
        size = -1;
    }
    for (int i = 0; i < ports.inputs_count; ++i) {
        if (!check(name, ports.inputs[i], config, inputs[i], layout)) {
            return false;
        }
        layout.type[i] = inputs[i].type;
    }
    if (layout[kBookRows] >= 0 && layout[kBookRows] != layout[kRows] + 3) {
        return refuse("%s: books: got %lld rows, allowed: rows + 3 = %lld", name,
                      static_cast<long long>(layout[kBookRows]),
                      static_cast<long long>(layout[kRows] + 3));
    }
    if (layout[kPlaces] >= 0 && layout[kPlaces] < layout[kLanes] + layout[kSequences]) {
        return refuse("%s: scores: got %lld places, allowed: lanes + sequences = %lld or more",
                      name, static_cast<long long>(layout[kPlaces]),
                      static_cast<long long>(layout[kLanes] + layout[kSequences]));
    }
    for (int i = 0; i < ports.outputs_count; ++i) {
        if (!check(name, ports.outputs[i], config, outputs[i], layout)) {
            return false;
        }
    }
    return true;
}

}  // namespace spin::trt
