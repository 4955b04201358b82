// SPDX-License-Identifier: Apache-2.0
// SpinSparseIndexer: scores of the kept blocks, and the best slots.
#include "scoring.h"

namespace spin::trt {
namespace {

using nvinfer1::DataType;

enum Input { kQuery, kWeights, kPagesIn, kTable, kList, kCount, kRowSlots, kVisibleSlots };
enum Output { kSlotsOut, kScoresOut };

constexpr unsigned kInt32 = bit_of(DataType::kINT32);

constexpr Port kInputs[] = {
    kQueryPorts[0],
    kQueryPorts[1],
    kQueryPorts[2],
    kQueryPorts[3],
    {"block_list", kInt32, 2, {kSequences, kBlocks}},
    {"block_count", kInt32, 1, {kSequences}},
    {"row_slots", kInt32, 2, {kSequences, kRows}},
    {"visible_slots", kInt32, 1, {kSequences}},
};

constexpr Port kOutputs[] = {
    {"slots", kInt32, 3, {kSequences, kRows, kTopK}},
    {"scores", bit_of(DataType::kFLOAT), 3, {kSequences, kRows, kScoreWidth}},
};

size_t workspace_bytes(const Config&, const Layout& layout) {
    Arena arena(nullptr);
    QueryRoom(arena, layout);
    return arena.used();
}

bool run(const Call& call) {
    Arena arena(call.workspace);
    const QueryRoom room(arena, call.layout);
    const Chosen chosen = {call.input<int32_t>(kList),
                           call.input<int32_t>(kCount),
                           call.input<int32_t>(kRowSlots),
                           call.input<int32_t>(kVisibleSlots),
                           nullptr,
                           call.output<float>(kScoresOut)};
    return score_and_choose(call, room, chosen, call.output<int32_t>(kSlotsOut));
}

}  // namespace

const Node kSparseIndexerNode = {"SpinSparseIndexer", kSparseIndexer,  ports_of(kInputs, kOutputs),
                                 always_agree,        workspace_bytes, run};

}  // namespace spin::trt
