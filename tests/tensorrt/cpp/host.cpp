// SPDX-License-Identifier: Apache-2.0
// Plays TensorRT's part for a plugin library, without TensorRT: opens it, creates nodes, asks what
// TensorRT asks, serialises and re-creates them, and enqueues. A C interface for ctypes.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstring>

#include "doubles.h"

using namespace nvinfer1;

#define HOST_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

doubles::Logger logger;
std::string shown_log, shown_name;

struct Library {
    IPluginCreatorInterface* const* creators;
    int32_t count;
};

IPluginCreatorV3One* find_creator(const Library* library, const char* node) {
    for (int i = 0; i < library->count; ++i) {
        auto* creator = static_cast<IPluginCreatorV3One*>(library->creators[i]);
        if (std::strcmp(creator->getPluginName(), node) == 0) {
            return creator;
        }
    }
    return nullptr;
}

template <typename Capability>
Capability* capability(IPluginV3* plugin, PluginCapabilityType type) {
    return static_cast<Capability*>(plugin->getCapabilityInterface(type));
}

IPluginV3OneCore* core(IPluginV3* plugin) {
    return capability<IPluginV3OneCore>(plugin, PluginCapabilityType::kCORE);
}
IPluginV3OneBuild* build(IPluginV3* plugin) {
    return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}
IPluginV3OneRuntime* runtime(IPluginV3* plugin) {
    return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

int64_t field_bytes(const PluginField& field) {
    const bool wide =
        field.type == PluginFieldType::kINT64 || field.type == PluginFieldType::kFLOAT64;
    const bool text = field.type == PluginFieldType::kCHAR;
    return int64_t{field.length} * (wide ? 8 : text ? 1 : 4);
}

std::vector<DynamicPluginTensorDesc> dynamic(const PluginTensorDesc* descs, int32_t count) {
    std::vector<DynamicPluginTensorDesc> made(count);
    for (int i = 0; i < count; ++i) {
        made[i] = {descs[i], descs[i].dims, descs[i].dims, descs[i].dims};
        for (int axis = 0; axis < descs[i].dims.nbDims; ++axis) {
            made[i].desc.dims.d[axis] = -1;
        }
    }
    return made;
}

}  // namespace

// Null if the library does not load or lacks one of the two names.
HOST_EXPORT Library* host_open(const char* path) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return nullptr;
    }
    using GetCreators = IPluginCreatorInterface* const*(int32_t&);
    auto* get_creators = reinterpret_cast<GetCreators*>(dlsym(handle, "getCreators"));
    auto* set_logger = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(handle, "setLoggerFinder"));
    if (get_creators == nullptr || set_logger == nullptr) {
        return nullptr;
    }
    set_logger(&logger);
    auto* library = new Library{};
    library->creators = get_creators(library->count);
    return library;
}

// Lines logged since the last call.
HOST_EXPORT const char* host_log() {
    shown_log.swap(logger.text);
    logger.text.clear();
    return shown_log.c_str();
}

// Namespace, version and name of creator `i`, or null.
HOST_EXPORT const char* host_creator(const Library* library, int32_t i) {
    if (i < 0 || i >= library->count) {
        return nullptr;
    }
    auto* creator = static_cast<IPluginCreatorV3One*>(library->creators[i]);
    const InterfaceInfo info = creator->getInterfaceInfo();
    shown_name = std::string(creator->getPluginNamespace()) + "/" + creator->getPluginVersion() +
                 "/" + creator->getPluginName() + "/" + info.kind;
    return shown_name.c_str();
}

HOST_EXPORT const PluginFieldCollection* host_field_names(const Library* library,
                                                          const char* node) {
    return find_creator(library, node)->getFieldNames();
}

HOST_EXPORT IPluginV3* host_create(const Library* library, const char* node,
                                   const PluginFieldCollection* fields) {
    return find_creator(library, node)->createPlugin("node", fields, TensorRTPhase::kBUILD);
}

HOST_EXPORT const PluginFieldCollection* host_serialize(IPluginV3* plugin) {
    return runtime(plugin)->getFieldsToSerialize();
}

// The plugin as an engine's file brings it back; the one given goes.
HOST_EXPORT IPluginV3* host_reload(const Library* library, IPluginV3* plugin) {
    const PluginFieldCollection* written = runtime(plugin)->getFieldsToSerialize();
    std::vector<std::string> names, data;
    std::vector<PluginField> fields;
    for (int i = 0; i < written->nbFields; ++i) {
        const PluginField& field = written->fields[i];
        names.emplace_back(field.name);
        data.emplace_back(static_cast<const char*>(field.data), field_bytes(field));
    }
    for (int i = 0; i < written->nbFields; ++i) {
        const PluginField& field = written->fields[i];
        fields.emplace_back(names[i].c_str(), data[i].data(), field.type, field.length);
    }
    IPluginCreatorV3One* creator = find_creator(library, core(plugin)->getPluginName());
    delete plugin;
    const PluginFieldCollection read = {static_cast<int32_t>(fields.size()), fields.data()};
    return creator->createPlugin("node", &read, TensorRTPhase::kRUNTIME);
}

HOST_EXPORT IPluginV3* host_clone(IPluginV3* plugin) {
    return plugin->clone();
}

HOST_EXPORT IPluginV3* host_attach(IPluginV3* plugin) {
    return runtime(plugin)->attachToContext(nullptr);
}

HOST_EXPORT void host_destroy(IPluginV3* plugin) {
    delete plugin;
}

// Version of the build interface: 1 or 2.
HOST_EXPORT int32_t host_build_version(IPluginV3* plugin) {
    return build(plugin)->getInterfaceInfo().major;
}

HOST_EXPORT int32_t host_outputs(IPluginV3* plugin) {
    return build(plugin)->getNbOutputs();
}

HOST_EXPORT int32_t host_aliased(IPluginV3* plugin, int32_t output) {
    if (host_build_version(plugin) < 2) {
        return -1;
    }
    return static_cast<IPluginV3OneBuildV2*>(build(plugin))->getAliasedInput(output);
}

HOST_EXPORT int32_t host_output_types(IPluginV3* plugin, const DataType* inputs,
                                      int32_t inputs_count, DataType* outputs,
                                      int32_t outputs_count) {
    return build(plugin)->getOutputDataTypes(outputs, outputs_count, inputs, inputs_count);
}

// Values of the output shapes, and in `constant` whether each is a constant of the network.
HOST_EXPORT int32_t host_output_shapes(IPluginV3* plugin, const Dims* inputs, int32_t inputs_count,
                                       Dims* outputs, int32_t* constant, int32_t outputs_count,
                                       int32_t shape_inputs_count) {
    doubles::ExprBuilder builder;
    std::vector<DimsExprs> given, made(outputs_count);
    for (int i = 0; i < inputs_count; ++i) {
        given.push_back(doubles::expressions(inputs[i], builder));
    }
    const int32_t status =
        build(plugin)->getOutputShapes(given.data(), inputs_count, nullptr, shape_inputs_count,
                                       made.data(), outputs_count, builder);
    for (int i = 0; status == 0 && i < outputs_count; ++i) {
        outputs[i].nbDims = made[i].nbDims;
        for (int axis = 0; axis < made[i].nbDims; ++axis) {
            const auto* dimension = static_cast<const doubles::Dimension*>(made[i].d[axis]);
            outputs[i].d[axis] = dimension->value;
            constant[i * Dims::MAX_DIMS + axis] = dimension->constant;
        }
    }
    return status;
}

HOST_EXPORT int32_t host_supports(IPluginV3* plugin, int32_t at, const PluginTensorDesc* descs,
                                  int32_t inputs_count, int32_t outputs_count) {
    const auto all = dynamic(descs, inputs_count + outputs_count);
    return build(plugin)->supportsFormatCombination(at, all.data(), inputs_count, outputs_count);
}

HOST_EXPORT int32_t host_configure(IPluginV3* plugin, const PluginTensorDesc* inputs,
                                   int32_t inputs_count, const PluginTensorDesc* outputs,
                                   int32_t outputs_count) {
    const auto in = dynamic(inputs, inputs_count), out = dynamic(outputs, outputs_count);
    return build(plugin)->configurePlugin(in.data(), inputs_count, out.data(), outputs_count);
}

HOST_EXPORT int64_t host_workspace(IPluginV3* plugin, const PluginTensorDesc* inputs,
                                   int32_t inputs_count, const PluginTensorDesc* outputs,
                                   int32_t outputs_count) {
    const auto in = dynamic(inputs, inputs_count), out = dynamic(outputs, outputs_count);
    return static_cast<int64_t>(
        build(plugin)->getWorkspaceSize(in.data(), inputs_count, out.data(), outputs_count));
}

HOST_EXPORT int32_t host_shape_change(IPluginV3* plugin, const PluginTensorDesc* inputs,
                                      int32_t inputs_count, const PluginTensorDesc* outputs,
                                      int32_t outputs_count) {
    return runtime(plugin)->onShapeChange(inputs, inputs_count, outputs, outputs_count);
}

HOST_EXPORT int32_t host_enqueue(IPluginV3* plugin, const PluginTensorDesc* inputs,
                                 const PluginTensorDesc* outputs, const void* const* in,
                                 void* const* out, void* workspace, cudaStream_t stream) {
    return runtime(plugin)->enqueue(inputs, outputs, in, out, workspace, stream);
}

// Nanoseconds that each of `count` calls took on the host; the first status that is not 0, else 0.
HOST_EXPORT int32_t host_time_enqueue(IPluginV3* plugin, const PluginTensorDesc* inputs,
                                      const PluginTensorDesc* outputs, const void* const* in,
                                      void* const* out, void* workspace, cudaStream_t stream,
                                      int64_t* nanoseconds, int32_t count) {
    using Clock = std::chrono::steady_clock;
    IPluginV3OneRuntime* node = runtime(plugin);
    for (int i = 0; i < count; ++i) {
        const Clock::time_point start = Clock::now();
        const int32_t status = node->enqueue(inputs, outputs, in, out, workspace, stream);
        nanoseconds[i] = std::chrono::nanoseconds(Clock::now() - start).count();
        if (status != 0) {
            return status;
        }
    }
    return 0;
}
