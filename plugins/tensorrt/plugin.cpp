// SPDX-License-Identifier: Apache-2.0
#include "plugin.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "graph.h"
#include "log.h"
#include "spin/common.h"

namespace spin::trt {
namespace {

using namespace nvinfer1;

constexpr int32_t kOk = 0, kRefused = 1;
constexpr uintptr_t kAlignment = 16;

// Whether there is an array for each side, of as many elements as the node has tensors.
bool all_given(const Node& node, const void* inputs, int32_t inputs_count, const void* outputs,
               int32_t outputs_count) {
    if (inputs_count != node.ports.inputs_count || outputs_count != node.ports.outputs_count) {
        return refuse("%s: tensors: got %d inputs and %d outputs, allowed: %d and %d", node.name,
                      inputs_count, outputs_count, node.ports.inputs_count,
                      node.ports.outputs_count);
    }
    return (inputs != nullptr && outputs != nullptr) ||
           refuse("%s: tensors: got null, allowed: arrays", node.name);
}

// Descriptions at the largest sizes of a profile.
bool check_largest(const Node& node, const Config& config, const DynamicPluginTensorDesc* inputs,
                   int32_t inputs_count, const DynamicPluginTensorDesc* outputs,
                   int32_t outputs_count, Layout& layout) {
    if (!all_given(node, inputs, inputs_count, outputs, outputs_count)) {
        return false;
    }
    PluginTensorDesc in[kMaxPorts], out[kMaxPorts];
    const auto largest = [](const DynamicPluginTensorDesc& given) {
        PluginTensorDesc desc = given.desc;
        desc.dims = given.max;
        return desc;
    };
    for (int i = 0; i < inputs_count; ++i) {
        in[i] = largest(inputs[i]);
    }
    for (int i = 0; i < outputs_count; ++i) {
        out[i] = largest(outputs[i]);
    }
    return check_ports(node.name, node.ports, config, in, out, layout);
}

bool check_address(const Node& node, const Port& port, const Layout& layout, const void* address) {
    if (layout.volume(port) == 0) {
        return true;
    }
    const bool fits = address != nullptr && reinterpret_cast<uintptr_t>(address) % kAlignment == 0;
    return fits || refuse("%s: %s: got address %p, allowed: aligned to 16 bytes", node.name,
                          port.name, address);
}

// Where the input that has a symbol first carries it.
const IDimensionExpr* find_size(const Ports& ports, const DimsExprs* inputs, Symbol symbol) {
    for (int i = 0; i < ports.inputs_count; ++i) {
        for (int axis = 0; axis < ports.inputs[i].rank; ++axis) {
            if (ports.inputs[i].dims[axis] == symbol) {
                return inputs[i].d[axis];
            }
        }
    }
    return nullptr;
}

// `Build` is TensorRT's first build interface for copying nodes, which is all that 10.0 knows, and
// the second for nodes that write their state in place.
template <typename Build>
class Plugin final : public IPluginV3,
                     public IPluginV3OneCore,
                     public Build,
                     public IPluginV3OneRuntime {
public:
    Plugin(const Node& node, const Config& config) noexcept
        : node_(node), config_(config), fields_(node.bit, &config_) {}

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
        switch (type) {
            case PluginCapabilityType::kCORE:
                return static_cast<IPluginV3OneCore*>(this);
            case PluginCapabilityType::kBUILD:
                return static_cast<Build*>(this);
            case PluginCapabilityType::kRUNTIME:
                return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    IPluginV3* clone() noexcept override { return new (std::nothrow) Plugin(node_, config_); }

    // ---- core ----

    const char* getPluginName() const noexcept override { return node_.name; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

    // ---- build ----

    int32_t getNbOutputs() const noexcept override { return node_.ports.outputs_count; }

    int32_t getOutputDataTypes(DataType* types, int32_t outputs_count, const DataType* inputs,
                               int32_t inputs_count) const noexcept override {
        if (!all_given(node_, inputs, inputs_count, types, outputs_count)) {
            return kRefused;
        }
        for (int i = 0; i < outputs_count; ++i) {
            const Port& port = node_.ports.outputs[i];
            types[i] = port.type_of >= 0 ? inputs[port.type_of] : only_type(port);
        }
        return kOk;
    }

    int32_t getOutputShapes(const DimsExprs* inputs, int32_t inputs_count, const DimsExprs*,
                            int32_t shape_inputs_count, DimsExprs* outputs, int32_t outputs_count,
                            IExprBuilder& builder) noexcept override {
        if (!all_given(node_, inputs, inputs_count, outputs, outputs_count)) {
            return kRefused;
        }
        if (shape_inputs_count != 0) {
            refuse("%s: shape inputs: got %d, allowed: 0", node_.name, shape_inputs_count);
            return kRefused;
        }
        for (int i = 0; i < inputs_count; ++i) {
            const Port& port = node_.ports.inputs[i];
            if (inputs[i].nbDims != port.rank) {
                refuse("%s: %s: got %d dimensions, allowed: %d", node_.name, port.name,
                       inputs[i].nbDims, port.rank);
                return kRefused;
            }
        }
        for (int i = 0; i < outputs_count; ++i) {
            const Port& port = node_.ports.outputs[i];
            if (port.alias_of >= 0) {
                outputs[i] = inputs[port.alias_of];
                continue;
            }
            outputs[i].nbDims = port.rank;
            for (int axis = 0; axis < port.rank; ++axis) {
                const int64_t fixed = fixed_size(port.dims[axis], config_);
                outputs[i].d[axis] = fixed >= 0 ? builder.constant(fixed)
                                                : find_size(node_.ports, inputs, port.dims[axis]);
            }
        }
        return kOk;
    }

    bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* tensors,
                                   int32_t inputs_count, int32_t outputs_count) noexcept override {
        const Ports& ports = node_.ports;
        if (tensors == nullptr || inputs_count != ports.inputs_count ||
            outputs_count != ports.outputs_count || at < 0 || at >= inputs_count + outputs_count) {
            return false;
        }
        const Port& port = at < inputs_count ? ports.inputs[at] : ports.outputs[at - inputs_count];
        const PluginTensorDesc& desc = tensors[at].desc;
        const DataType of = port.type_of >= 0 ? tensors[port.type_of].desc.type : desc.type;
        return desc.format == TensorFormat::kLINEAR && has_type(port, desc.type, of);
    }

    int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t inputs_count,
                            const DynamicPluginTensorDesc* outputs,
                            int32_t outputs_count) noexcept override {
        Layout layout;
        return check_largest(node_, config_, inputs, inputs_count, outputs, outputs_count, layout)
                   ? kOk
                   : kRefused;
    }

    size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t inputs_count,
                            const DynamicPluginTensorDesc* outputs,
                            int32_t outputs_count) const noexcept override {
        Layout layout;
        return check_largest(node_, config_, inputs, inputs_count, outputs, outputs_count, layout)
                   ? node_.workspace_bytes(config_, layout)
                   : 0;
    }

    // One format for each data type: nothing to time, so that a build needs no run.
    int32_t getFormatCombinationLimit() noexcept override { return 1; }

    // Only the second build interface asks.
    int32_t getAliasedInput(int32_t output) noexcept {
        const bool known = output >= 0 && output < node_.ports.outputs_count;
        return known ? node_.ports.outputs[output].alias_of : -1;
    }

    // ---- runtime ----

    int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t inputs_count,
                          const PluginTensorDesc* outputs,
                          int32_t outputs_count) noexcept override {
        Layout layout;
        if (!all_given(node_, inputs, inputs_count, outputs, outputs_count) ||
            !check_ports(node_.name, node_.ports, config_, inputs, outputs, layout)) {
            return kRefused;
        }
        // Launches depend on sizes, so that any address does until there are some.
        void* const anywhere = reinterpret_cast<void*>(uintptr_t{1} << 20);
        void* addresses[kMaxPorts];
        std::fill(std::begin(addresses), std::end(addresses), anywhere);
        const Call call = {node_.name, config_, layout, addresses, addresses, anywhere, nullptr};
        return graphs_.prepare(node_, call) ? kOk : kRefused;
    }

    int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                    const void* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override {
        Layout layout;
        if (!check_ports(node_.name, node_.ports, config_, input_descs, output_descs, layout) ||
            !check_addresses(layout, inputs, outputs, workspace)) {
            return kRefused;
        }
        if (layout[kSequences] == 0 && config_.aliased) {
            return kOk;
        }
        const Call call = {node_.name, config_, layout, inputs, outputs, workspace, stream};
        return prepare_state(call) && graphs_.run(node_, call) ? kOk : kRefused;
    }

    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
    const PluginFieldCollection* getFieldsToSerialize() noexcept override { return fields_.get(); }

private:
    static DataType only_type(const Port& port) {
        return static_cast<DataType>(__builtin_ctz(port.types));
    }

    bool check_addresses(const Layout& layout, const void* const* inputs, void* const* outputs,
                         const void* workspace) const {
        if (inputs == nullptr || outputs == nullptr) {
            return refuse("%s: tensors: got null, allowed: addresses", node_.name);
        }
        for (int i = 0; i < node_.ports.inputs_count; ++i) {
            if (!check_address(node_, node_.ports.inputs[i], layout, inputs[i])) {
                return false;
            }
        }
        for (int i = 0; i < node_.ports.outputs_count; ++i) {
            if (!check_address(node_, node_.ports.outputs[i], layout, outputs[i])) {
                return false;
            }
        }
        const bool needed = node_.workspace_bytes(config_, layout) > 0;
        return !needed ||
               (workspace != nullptr && reinterpret_cast<uintptr_t>(workspace) % kAlignment == 0) ||
               refuse("%s: workspace: got address %p, allowed: aligned to 16 bytes", node_.name,
                      workspace);
    }

    // State outputs hold the state before the first launch: the same memory, or a copy of it.
    bool prepare_state(const Call& call) const {
        for (int i = 0; i < node_.ports.outputs_count; ++i) {
            const Port& port = node_.ports.outputs[i];
            if (port.alias_of < 0 || call.inputs[port.alias_of] == call.outputs[i]) {
                continue;
            }
            if (config_.aliased) {
                return refuse(
                    "%s: %s: got an output apart from its input, allowed: one buffer for "
                    "both, and PreviewFeature::kALIASED_PLUGIN_IO_10_03 in the build",
                    node_.name, port.name);
            }
            const int64_t bytes =
                call.layout.volume(port) * bytes_of(call.layout.type[port.alias_of]);
            const cudaError_t error =
                cudaMemcpyAsync(call.outputs[i], call.inputs[port.alias_of],
                                static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, call.stream);
            if (error != cudaSuccess) {
                (void)cudaGetLastError();
                return refuse("%s: %s: copy: %s", node_.name, port.name, cudaGetErrorString(error));
            }
        }
        return true;
    }

    const Node& node_;
    const Config config_;
    const FieldList fields_;
    Graphs graphs_;
};

}  // namespace

bool launched(const Call& call, const char* stem, int status) noexcept {
    return status == SPIN_OK || refuse("%s: %s: %s", call.node, stem, spin_error_string(status));
}

IPluginV3* Creator::createPlugin(const char*, const PluginFieldCollection* given,
                                 TensorRTPhase) noexcept {
    Config config;
    if (!read_fields(node_.name, node_.bit, given, config) || !node_.agree(node_.name, config)) {
        return nullptr;
    }
    const bool in_place = config.aliased && (node_.bit & (kIndexer | kObserve)) != 0;
    if (in_place) {
        return new (std::nothrow) Plugin<IPluginV3OneBuildV2>(node_, config);
    }
    return new (std::nothrow) Plugin<IPluginV3OneBuild>(node_, config);
}

}  // namespace spin::trt
