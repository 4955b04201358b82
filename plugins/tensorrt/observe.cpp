// SPDX-License-Identifier: Apache-2.0
// SpinObserve: the averages learn from the scores of the accepted rows.
#include "selection.h"
#include "spin/observe_scores.h"

namespace spin::trt {
namespace {

using nvinfer1::DataType;

enum Input { kV, kD, kLanesIn, kPositions, kAccepted, kScores, kCompact };
enum Output { kVOut, kDOut };

constexpr unsigned kInt64 = bit_of(DataType::kINT64);

constexpr Port kInputs[] = {
    {"v", kStateTypes, 2, {kLanes, kVWidth}},
    {"d", kStateTypes, 2, {kLanes, kDWidth}, kV},
    {"lanes", kInt64, 1, {kSequences}},
    {"positions", kInt64, 2, {kSequences, kRows}},
    {"accepted", kInt64, 1, {kSequences}},
    {"scores", bit_of(DataType::kFLOAT), 3, {kSequences, kRows, kScoreWidth}},
    {"compact_of_block", bit_of(DataType::kINT32), 2, {kSequences, kBlocks}},
};

constexpr Port kOutputs[] = {
    {"v", kStateTypes, 2, {kLanes, kVWidth}, kV, kV},
    {"d", kStateTypes, 2, {kLanes, kDWidth}, kV, kD},
};

bool run(const Call& call) {
    const Config& config = call.config;
    const Layout& layout = call.layout;
    SpinObserveScoresParams p = {};
    p.struct_bytes = sizeof(p);
    p.v = call.outputs[kVOut];
    p.d = call.outputs[kDOut];
    p.lanes = call.input<int64_t>(kLanesIn);
    p.positions = call.input<int64_t>(kPositions);
    p.accepted = call.input<int64_t>(kAccepted);
    p.scores = call.input<float>(kScores);
    p.compact_of_block = call.input<int32_t>(kCompact);
    p.slots = config.slots;
    p.v_stride = layout[kVWidth];
    p.d_stride = layout[kDWidth];
    p.score_stride = config.width();
    p.lanes_total = layout[kLanes];
    p.entries = static_cast<int32_t>(layout[kSequences]);
    p.rows = static_cast<int32_t>(layout[kRows]);
    p.blocks = static_cast<int32_t>(config.blocks());
    p.ratio = static_cast<int32_t>(config.ratio);
    p.block_size = static_cast<int32_t>(config.block_size);
    p.state_dtype = state_dtype(layout.type[kV]);
    p.row0_update = static_cast<int32_t>(config.row0_update);
    p.decay = static_cast<float>(config.ema_decay);
    p.gain = static_cast<float>(1.0 - config.ema_decay);
    return launched(call, "observe_scores", spin_observe_scores(&p, call.stream));
}

}  // namespace

const Node kObserveNode = {"SpinObserve", kObserve,     ports_of(kInputs, kOutputs),
                           always_agree,  no_workspace, run};

}  // namespace spin::trt
