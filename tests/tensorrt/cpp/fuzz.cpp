// SPDX-License-Identifier: Apache-2.0
// Random fields, descriptions and addresses for every node, for as many seconds as asked. Built
// from the plugin's own sources with sanitisers and stubs.cpp, so that a wrong step ends the
// process.
//
// usage: fuzz [seconds] [seed]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "doubles.h"

using namespace nvinfer1;

extern "C" IPluginCreatorInterface* const* getCreators(int32_t& count);
extern "C" void setLoggerFinder(ILoggerFinder* finder);

namespace {

std::mt19937_64 random_bits;
doubles::Logger logger;

// A refusal is one line, and of what is taken there is none.
void demand_lines(bool refused, const char* call) {
    const auto lines = std::count(logger.text.begin(), logger.text.end(), '\n');
    if (lines != (refused ? 1 : 0)) {
        std::fprintf(stderr, "%s: %d lines: %s\n", call, static_cast<int>(lines),
                     logger.text.c_str());
        std::abort();
    }
    logger.text.clear();
}

int64_t below(int64_t limit) {
    return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(limit));
}
bool chance(int one_in) {
    return below(one_in) == 0;
}

constexpr int64_t kNumbers[] = {0,  1,   2,   3,   4,    8,         16,        31,        32,
                                64, 128, 256, 512, 1023, 400000,    1000000,   -1,        7,
                                5,  40,  41,  100, 132,  INT32_MAX, INT64_MAX, INT64_MIN, 1 << 20};

int64_t number() {
    return chance(6) ? static_cast<int64_t>(random_bits())
                     : kNumbers[below(sizeof(kNumbers) / sizeof(kNumbers[0]))];
}

// One of a few plausible values of each field, so that many sets of fields are good.
int64_t plausible(const char* name) {
    const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
    if (is("block_size"))
        return 16 << below(4);
    if (is("page_slots"))
        return 32 << below(2);
    if (is("slots"))
        return 1 + below(2000);
    if (is("ratio"))
        return 1 + below(4);
    return below(2);
}

struct Value {
    alignas(8) char bytes[64];
    int32_t length;
    PluginFieldType type;
};

Value value_of(const PluginField& field) {
    Value value = {};
    value.length = chance(12) ? static_cast<int32_t>(below(5)) - 1 : 1;
    value.type = field.type;
    const int64_t integer = chance(5) ? number() : plausible(field.name);
    const double real = chance(5) ? static_cast<double>(number()) : 1.0 / (1 + below(9));
    if (chance(8)) {
        value.type = static_cast<PluginFieldType>(below(16));
    }
    if (chance(5)) {
        value.type = PluginFieldType::kCHAR;
        value.length = std::snprintf(value.bytes, sizeof(value.bytes), "%lld",
                                     static_cast<long long>(integer)) +
                       static_cast<int32_t>(below(2));
        return value;
    }
    if (value.type == PluginFieldType::kFLOAT64) {
        std::memcpy(value.bytes, &real, sizeof(real));
    } else if (value.type == PluginFieldType::kFLOAT32) {
        const float narrow = static_cast<float>(real);
        std::memcpy(value.bytes, &narrow, sizeof(narrow));
    } else {
        std::memcpy(value.bytes, &integer, sizeof(integer));
    }
    return value;
}

IPluginV3* create(IPluginCreatorV3One& creator) {
    const PluginFieldCollection& names = *creator.getFieldNames();
    std::vector<Value> values;
    std::vector<PluginField> fields;
    values.reserve(64);
    for (int i = 0; i < names.nbFields; ++i) {
        const int copies = chance(20) ? static_cast<int>(below(3)) : 1;
        for (int n = 0; n < copies; ++n) {
            values.push_back(value_of(names.fields[i]));
            const Value& value = values.back();
            const char* name =
                chance(60) ? (chance(2) ? "oth\ner" : nullptr) : names.fields[i].name;
            const void* data = chance(60) ? nullptr : value.bytes;
            fields.emplace_back(name, data, value.type, value.length);
        }
    }
    PluginFieldCollection given = {static_cast<int32_t>(fields.size()), fields.data()};
    if (chance(100)) {
        given = {static_cast<int32_t>(number()), nullptr};
    }
    const auto phase = chance(2) ? TensorRTPhase::kBUILD : TensorRTPhase::kRUNTIME;
    return creator.createPlugin("fuzz", chance(200) ? nullptr : &given, phase);
}

// Whether two plugins say the same when serialised.
bool same_fields(IPluginV3& a, IPluginV3& b) {
    const auto fields = [](IPluginV3& plugin) {
        auto* node = plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME);
        return static_cast<IPluginV3OneRuntime*>(node)->getFieldsToSerialize();
    };
    const PluginFieldCollection &x = *fields(a), &y = *fields(b);
    bool same = x.nbFields == y.nbFields;
    for (int i = 0; same && i < x.nbFields; ++i) {
        same = std::strcmp(x.fields[i].name, y.fields[i].name) == 0 &&
               x.fields[i].type == y.fields[i].type && x.fields[i].length == 1 &&
               std::memcmp(x.fields[i].data, y.fields[i].data, 8) == 0;
    }
    return same;
}

// Ranks and types of the inputs of a node, and what TensorRT would make of its outputs.
struct Tensors {
    std::vector<PluginTensorDesc> inputs, outputs;
    std::vector<DynamicPluginTensorDesc> dynamic_inputs, dynamic_outputs;
};

DynamicPluginTensorDesc spread(const PluginTensorDesc& desc) {
    DynamicPluginTensorDesc made = {desc, desc.dims, desc.dims, desc.dims};
    if (chance(10)) {
        made.max.nbDims = static_cast<int32_t>(below(9));
    }
    return made;
}

int64_t field_value(IPluginV3OneRuntime& node, const char* name) {
    const PluginFieldCollection& fields = *node.getFieldsToSerialize();
    for (int i = 0; i < fields.nbFields; ++i) {
        if (std::strcmp(fields.fields[i].name, name) == 0) {
            return *static_cast<const int64_t*>(fields.fields[i].data);
        }
    }
    return 64;
}

PluginTensorDesc desc_of(DataType type, std::initializer_list<int64_t> dims) {
    PluginTensorDesc made = {};
    made.type = type;
    for (const int64_t d : dims) {
        made.dims.d[made.dims.nbDims++] = d;
    }
    return made;
}

void damage(PluginTensorDesc& desc) {
    switch (below(4)) {
        case 0:
            desc.type = static_cast<DataType>(below(12));
            break;
        case 1:
            desc.dims.nbDims = static_cast<int32_t>(number());
            break;
        case 2:
            desc.dims.d[below(4)] = number();
            break;
        default:
            desc.format = static_cast<TensorFormat>(below(13));
    }
}

// Mostly what the node wants, sometimes with a fault.
Tensors make_tensors(const char* name, IPluginV3OneBuild& build, IPluginV3OneRuntime& node) {
    const int64_t slots = field_value(node, "slots"), b = field_value(node, "block_size");
    const int64_t blocks = (slots + b - 1) / b, page = field_value(node, "page_slots");
    const int64_t s = below(5), r = 1 + below(8), m = 1 + below(6), p = below(9);
    const int64_t heads = 32 << below(2), vw = (slots + 7) / 8 * 8, dw = (slots + 8) / 8 * 8;
    const DataType state = chance(2) ? DataType::kFLOAT : DataType::kBF16;
    constexpr DataType kQueries[] = {DataType::kFP8, DataType::kHALF, DataType::kBF16};
    const bool words = chance(2);
    const std::vector<PluginTensorDesc> query = {
        desc_of(kQueries[below(3)], {s, r, heads, 128}),
        desc_of(DataType::kFLOAT, {s, r, heads}),
        words ? desc_of(DataType::kINT32, {7, page * 33})
              : desc_of(DataType::kINT8, {7, page * 132}),
        desc_of(DataType::kINT32, {s, p}),
    };
    const auto averages = [&](std::vector<PluginTensorDesc>& to) {
        to.push_back(desc_of(state, {m, vw}));
        to.push_back(desc_of(state, {m, dw}));
    };
    const PluginTensorDesc lanes = desc_of(DataType::kINT64, {s});
    const PluginTensorDesc positions = desc_of(DataType::kINT64, {s, r});
    Tensors made;
    if (std::strcmp(name, "SpinIndexer") == 0) {
        made.inputs = query;
        made.inputs.insert(made.inputs.end(), {lanes, positions, lanes});
        averages(made.inputs);
        made.inputs.push_back(desc_of(DataType::kFLOAT, {m + s, r, blocks * b}));
        made.inputs.push_back(desc_of(DataType::kINT32, {m + s, blocks}));
        made.inputs.push_back(desc_of(DataType::kINT64, {r + 3, m}));
    } else if (std::strcmp(name, "SpinPredictBlocks") == 0) {
        averages(made.inputs);
        made.inputs.insert(made.inputs.end(),
                           {lanes, positions, lanes, desc_of(DataType::kBOOL, {s}), query[3]});
    } else if (std::strcmp(name, "SpinSparseIndexer") == 0) {
        made.inputs = query;
        made.inputs.insert(made.inputs.end(),
                           {desc_of(DataType::kINT32, {s, blocks}), desc_of(DataType::kINT32, {s}),
                            desc_of(DataType::kINT32, {s, r}), desc_of(DataType::kINT32, {s})});
    } else {
        averages(made.inputs);
        made.inputs.insert(made.inputs.end(),
                           {lanes, positions, lanes, desc_of(DataType::kFLOAT, {s, r, blocks * b}),
                            desc_of(DataType::kINT32, {s, blocks})});
    }
    if (chance(3)) {
        damage(made.inputs[below(static_cast<int64_t>(made.inputs.size()))]);
    }
    const int count = build.getNbOutputs(), given = static_cast<int>(made.inputs.size());
    std::vector<DataType> in_types, out_types(count);
    doubles::ExprBuilder builder;
    std::vector<DimsExprs> in_dims, out_dims(count);
    for (const PluginTensorDesc& desc : made.inputs) {
        in_types.push_back(desc.type);
        in_dims.push_back(doubles::expressions(desc.dims, builder));
    }
    const int told = chance(30) ? static_cast<int>(below(given + 1)) : given;
    demand_lines(build.getOutputDataTypes(chance(100) ? nullptr : out_types.data(), count,
                                          in_types.data(), told) != 0,
                 "types");
    const int32_t status =
        build.getOutputShapes(in_dims.data(), told, nullptr, chance(100) ? 1 : 0,
                              chance(100) ? nullptr : out_dims.data(), count, builder);
    demand_lines(status != 0, "shapes");
    made.outputs.resize(count);
    for (int i = 0; i < count; ++i) {
        made.outputs[i].type = out_types[i];
        for (int axis = 0; status == 0 && axis < out_dims[i].nbDims; ++axis) {
            const auto* dimension = static_cast<const doubles::Dimension*>(out_dims[i].d[axis]);
            made.outputs[i].dims.d[axis] = dimension->value;
            made.outputs[i].dims.nbDims = out_dims[i].nbDims;
        }
    }
    if (chance(8)) {
        damage(made.outputs[below(count)]);
    }
    for (const PluginTensorDesc& desc : made.inputs) {
        made.dynamic_inputs.push_back(spread(desc));
    }
    for (const PluginTensorDesc& desc : made.outputs) {
        made.dynamic_outputs.push_back(spread(desc));
    }
    return made;
}

void* address() {
    constexpr uintptr_t kSomewhere = 0x7f0000000000;  // never read: nothing is launched
    return chance(40) ? (chance(2) ? nullptr : reinterpret_cast<void*>(kSomewhere + below(16)))
                      : reinterpret_cast<void*>(kSomewhere + 256 * below(4));
}

// Asks everything TensorRT asks, in its order. True if enqueue took it all.
bool exercise(IPluginV3& plugin) {
    auto* core =
        static_cast<IPluginV3OneCore*>(plugin.getCapabilityInterface(PluginCapabilityType::kCORE));
    auto* build = static_cast<IPluginV3OneBuild*>(
        plugin.getCapabilityInterface(PluginCapabilityType::kBUILD));
    auto* node = static_cast<IPluginV3OneRuntime*>(
        plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    plugin.getCapabilityInterface(static_cast<PluginCapabilityType>(below(100)));
    Tensors tensors = make_tensors(core->getPluginName(), *build, *node);
    std::vector<DynamicPluginTensorDesc> all = tensors.dynamic_inputs;
    all.insert(all.end(), tensors.dynamic_outputs.begin(), tensors.dynamic_outputs.end());
    const int in = static_cast<int>(tensors.inputs.size());
    const int out = static_cast<int>(tensors.outputs.size());
    for (int n = 0; n < 4; ++n) {
        build->supportsFormatCombination(static_cast<int>(below(in + out + 2)) - 1, all.data(), in,
                                         out);
    }
    if (build->getInterfaceInfo().major == 2) {
        auto* second = static_cast<IPluginV3OneBuildV2*>(build);
        for (int i = -1; i <= out; ++i) {
            second->getAliasedInput(i);
        }
    }
    const DynamicPluginTensorDesc *from = tensors.dynamic_inputs.data(),
                                  *to = tensors.dynamic_outputs.data();
    const bool configured = build->configurePlugin(from, in, to, out) == 0;
    demand_lines(!configured, "configure");
    build->getWorkspaceSize(from, in, to, out);
    demand_lines(!configured, "workspace");
    demand_lines(node->onShapeChange(tensors.inputs.data(), chance(50) ? in - 1 : in,
                                     tensors.outputs.data(), out) != 0,
                 "shape change");
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (int i = 0; i < in; ++i) {
        inputs.push_back(address());
    }
    for (int i = 0; i < out; ++i) {
        outputs.push_back(address());
        const int32_t alias = build->getInterfaceInfo().major == 2
                                  ? static_cast<IPluginV3OneBuildV2*>(build)->getAliasedInput(i)
                                  : -1;
        if (alias >= 0 && !chance(20)) {
            outputs.back() = const_cast<void*>(inputs[alias]);
        }
    }
    const bool taken = node->enqueue(chance(100) ? nullptr : tensors.inputs.data(),
                                     tensors.outputs.data(), chance(100) ? nullptr : inputs.data(),
                                     outputs.data(), address(), nullptr) == 0;
    demand_lines(!taken, "enqueue");
    return taken;
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 60.0;
    random_bits.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
    setLoggerFinder(&logger);
    int32_t count = 0;
    IPluginCreatorInterface* const* creators = getCreators(count);
    int64_t tried = 0, created = 0, enqueued = 0;
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
           seconds) {
        auto& creator = *static_cast<IPluginCreatorV3One*>(creators[below(count)]);
        std::unique_ptr<IPluginV3> plugin(create(creator));
        ++tried;
        demand_lines(plugin == nullptr, "create");
        if (plugin == nullptr) {
            continue;
        }
        ++created;
        auto* node = plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME);
        std::unique_ptr<IPluginV3> again(creator.createPlugin(
            "again", static_cast<IPluginV3OneRuntime*>(node)->getFieldsToSerialize(),
            TensorRTPhase::kRUNTIME));
        std::unique_ptr<IPluginV3> copy(plugin->clone());
        if (again == nullptr || !same_fields(*plugin, *again) || !same_fields(*plugin, *copy)) {
            std::fprintf(stderr, "re-created otherwise\n");
            return 1;
        }
        plugin.reset();
        for (int n = 0; n < 8; ++n) {
            enqueued += exercise(n % 2 == 0 ? *again : *copy);
        }
    }
    std::printf("%lld tried, %lld created, %lld enqueued\n", static_cast<long long>(tried),
                static_cast<long long>(created), static_cast<long long>(enqueued));
    return created > 0 && enqueued > 0 ? 0 : 1;
}
