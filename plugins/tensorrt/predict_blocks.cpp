// SPDX-License-Identifier: Apache-2.0
// SpinPredictBlocks: which blocks a step keeps, from the averages alone.
#include "log.h"
#include "selection.h"

namespace spin::trt {
namespace {

using nvinfer1::DataType;

enum Input { kV, kD, kLanesIn, kPositions, kIds, kWarm, kTable };
enum Output { kList, kCount, kCompact, kRowSlots, kKeptSlots, kVisibleSlots, kPagesOut };

constexpr unsigned kInt32 = bit_of(DataType::kINT32), kInt64 = bit_of(DataType::kINT64);

constexpr Port kInputs[] = {
    {"v", kStateTypes, 2, {kLanes, kVWidth}},
    {"d", kStateTypes, 2, {kLanes, kDWidth}, kV},
    {"lanes", kInt64, 1, {kSequences}},
    {"positions", kInt64, 2, {kSequences, kRows}},
    {"sequence_ids", kInt64, 1, {kSequences}},
    {"warm", bit_of(DataType::kBOOL), 1, {kSequences}},
    {"page_table", kInt32, 2, {kSequences, kTableWidth}},
};

constexpr Port kOutputs[] = {
    {"block_list", kInt32, 2, {kSequences, kBlocks}},
    {"block_count", kInt32, 1, {kSequences}},
    {"compact_of_block", kInt32, 2, {kSequences, kBlocks}},
    {"row_slots", kInt32, 2, {kSequences, kRows}},
    {"kept_slots", kInt32, 1, {kSequences}},
    {"visible_slots", kInt32, 1, {kSequences}},
    {"compact_pages", kInt32, 2, {kSequences, kCompactPages}},
};

bool agree(const char* name, const Config& config) {
    return config.page_slots <= config.block_size ||
           refuse("%s: page_slots: got %lld, allowed: at most block_size = %lld", name,
                  static_cast<long long>(config.page_slots),
                  static_cast<long long>(config.block_size));
}

float* block_scores(Arena& arena, const Config& config, const Layout& layout) {
    return arena.take<float>(layout[kSequences] * layout[kRows] * config.blocks());
}

size_t workspace_bytes(const Config& config, const Layout& layout) {
    Arena arena(nullptr);
    block_scores(arena, config, layout);
    return arena.used();
}

bool run(const Call& call) {
    Arena arena(call.workspace);
    float* scores = block_scores(arena, call.config, call.layout);
    if (!predict(call, call.inputs[kV], call.inputs[kD], call.layout.type[kV],
                 call.input<int64_t>(kLanesIn), call.input<int64_t>(kPositions), scores)) {
        return false;
    }
    SpinSelectBlocksParams p = {};
    fill_selection(call, p);
    p.block_scores = scores;
    p.positions = call.input<int64_t>(kPositions);
    p.warm = call.input<uint8_t>(kWarm);
    p.sequence_ids = call.input<int64_t>(kIds);
    p.block_list = call.output<int32_t>(kList);
    p.block_count = call.output<int32_t>(kCount);
    p.compact_of_block = call.output<int32_t>(kCompact);
    p.row_slots = call.output<int32_t>(kRowSlots);
    p.kept_slots = call.output<int32_t>(kKeptSlots);
    p.visible_slots = call.output<int32_t>(kVisibleSlots);
    p.compact_pages = call.output<int32_t>(kPagesOut);
    // A table without columns may be null, which would leave compact_pages unwritten.
    p.page_table = call.layout[kTableWidth] > 0 ? call.input<int32_t>(kTable) : p.block_list;
    p.page_table_stride = call.layout[kTableWidth];
    p.page_table_width = static_cast<int32_t>(call.layout[kTableWidth]);
    p.compact_pages_stride = call.layout[kCompactPages];
    p.page_slots = static_cast<int32_t>(call.config.page_slots);
    return launched(call, "select_blocks", spin_select_blocks(&p, call.stream));
}

}  // namespace

const Node kPredictBlocksNode = {
    "SpinPredictBlocks", kPredictBlocks, ports_of(kInputs, kOutputs), agree, workspace_bytes, run};

}  // namespace spin::trt
