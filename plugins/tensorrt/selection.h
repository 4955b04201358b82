// SPDX-License-Identifier: Apache-2.0
// The choice of blocks, as far as SpinIndexer and SpinPredictBlocks have it in common.
#pragma once

#include "node.h"
#include "spin/predict_blocks.h"
#include "spin/select_blocks.h"

namespace spin::trt {

// Bits of the averages' data types.
constexpr unsigned kStateTypes =
    bit_of(nvinfer1::DataType::kFLOAT) | bit_of(nvinfer1::DataType::kBF16);

int32_t state_dtype(nvinfer1::DataType type);

// Block scores [sequences, rows, blocks] of averages at `v` and `d`, by any pooling.
bool predict(const Call& call, const void* v, const void* d, nvinfer1::DataType type,
             const int64_t* lanes, const int64_t* positions, float* block_scores);

// Parameters that follow from fields and sizes.
void fill_selection(const Call& call, SpinSelectBlocksParams& params);

}  // namespace spin::trt
