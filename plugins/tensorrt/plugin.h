// SPDX-License-Identifier: Apache-2.0
// TensorRT's view of a node.
#pragma once

#include <NvInferRuntime.h>

#include "node.h"

#if NV_TENSORRT_MAJOR < 10 || (NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR < 3)
#error "needs the headers of TensorRT 10.3 or later: older ones cannot alias outputs to inputs"
#endif

namespace spin::trt {

constexpr const char* kNamespace = "spin";
constexpr const char* kVersion = "1";

class Creator : public nvinfer1::IPluginCreatorV3One {
public:
    explicit Creator(const Node& node) noexcept : node_(node), fields_(node.bit, nullptr) {}

    nvinfer1::IPluginV3* createPlugin(const char* name,
                                      const nvinfer1::PluginFieldCollection* given,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override {
        return fields_.get();
    }
    const char* getPluginName() const noexcept override { return node_.name; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

private:
    const Node& node_;
    FieldList fields_;
};

}  // namespace spin::trt
