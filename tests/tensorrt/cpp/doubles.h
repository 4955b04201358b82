// SPDX-License-Identifier: Apache-2.0
// What TensorRT hands to a plugin, played by the test: a logger and dimension expressions.
#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

namespace doubles {

// Keeps the lines.
class Logger : public nvinfer1::ILogger, public nvinfer1::ILoggerFinder {
public:
    void log(Severity, const char* line) noexcept override {
        text += line;
        text += '\n';
    }
    nvinfer1::ILogger* findLogger() override { return this; }

    std::string text;
};

// A dimension whose value is known, though it need not be a constant.
class Dimension : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
public:
    Dimension(int64_t value, bool constant) : value(value), constant(constant) { mImpl = this; }

    const int64_t value;
    const bool constant;

private:
    bool isConstant() const override { return constant; }
    int64_t getConstantValue() const override { return value; }
    bool isSizeTensor() const override { return false; }
};

// Knows constants; these plugins build no other expressions.
class ExprBuilder : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
public:
    ExprBuilder() { mImpl = this; }

    nvinfer1::IDimensionExpr const* make(int64_t value, bool is_constant) {
        made_.push_back(std::make_unique<Dimension>(value, is_constant));
        return made_.back().get();
    }

private:
    nvinfer1::IDimensionExpr const* constant(int64_t value) override { return make(value, true); }
    nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation,
                                              nvinfer1::IDimensionExpr const&,
                                              nvinfer1::IDimensionExpr const&) override {
        return nullptr;
    }
    nvinfer1::IDimensionExpr const* declareSizeTensor(int32_t, nvinfer1::IDimensionExpr const&,
                                                      nvinfer1::IDimensionExpr const&) override {
        return nullptr;
    }

    std::vector<std::unique_ptr<Dimension>> made_;
};

inline nvinfer1::DimsExprs expressions(const nvinfer1::Dims& dims, ExprBuilder& builder) {
    nvinfer1::DimsExprs made = {};
    made.nbDims = dims.nbDims;
    for (int i = 0; i < dims.nbDims && i < nvinfer1::Dims::MAX_DIMS; ++i) {
        made.d[i] = builder.make(dims.d[i], false);
    }
    return made;
}

}  // namespace doubles
