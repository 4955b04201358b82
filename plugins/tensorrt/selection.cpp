// SPDX-License-Identifier: Apache-2.0
#include "selection.h"

namespace spin::trt {

int32_t state_dtype(nvinfer1::DataType type) {
    return type == nvinfer1::DataType::kBF16 ? SPIN_STATE_BF16 : SPIN_STATE_FP32;
}

bool predict(const Call& call, const void* v, const void* d, nvinfer1::DataType type,
             const int64_t* lanes, const int64_t* positions, float* block_scores) {
    const Config& config = call.config;
    SpinPredictBlocksParams p = {};
    p.struct_bytes = sizeof(p);
    p.v = v;
    p.d = d;
    p.lanes = lanes;
    p.positions = positions;
    p.block_scores = block_scores;
    p.slots = config.slots;
    p.v_stride = call.layout[kVWidth];
    p.d_stride = call.layout[kDWidth];
    p.lane_stride = call.layout[kLanes];
    p.entries = static_cast<int32_t>(call.layout[kSequences]);
    p.sequences = p.entries;
    p.rows = static_cast<int32_t>(call.layout[kRows]);
    p.blocks = static_cast<int32_t>(config.blocks());
    p.ratio = static_cast<int32_t>(config.ratio);
    p.block_size = static_cast<int32_t>(config.block_size);
    p.state_dtype = state_dtype(type);
    p.pooling = static_cast<int32_t>(config.pooling);
    return launched(call, "predict_blocks", spin_predict_blocks(&p, call.stream));
}

void fill_selection(const Call& call, SpinSelectBlocksParams& p) {
    const Config& config = call.config;
    p.struct_bytes = sizeof(p);
    p.seed = static_cast<uint64_t>(config.seed);
    p.entries = static_cast<int32_t>(call.layout[kSequences]);
    p.sequences = p.entries;
    p.layer_entries = p.entries;
    p.layer = static_cast<int32_t>(config.layer);
    p.rows = static_cast<int32_t>(call.layout[kRows]);
    p.blocks = static_cast<int32_t>(config.blocks());
    p.ratio = static_cast<int32_t>(config.ratio);
    p.block_size = static_cast<int32_t>(config.block_size);
    p.top_k = static_cast<int32_t>(config.top_k);
    p.sparsity_ppm = static_cast<int32_t>(config.sparsity_ppm);
    p.exploration_ppm = static_cast<int32_t>(config.exploration_ppm);
    p.row0_mask = static_cast<int32_t>(config.row0_mask);
}

}  // namespace spin::trt
