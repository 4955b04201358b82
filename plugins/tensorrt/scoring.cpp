// SPDX-License-Identifier: Apache-2.0
#include "scoring.h"

#include "spin/quantize_query.h"
#include "spin/score_slots.h"
#include "spin/topk_slots.h"

namespace spin::trt {
namespace {

int64_t heads_of(const Layout& layout) {
    return layout[kSequences] * layout[kRows] * layout[kHeads];
}

bool quantize(const Call& call, const QueryRoom& room) {
    const bool half = call.layout.type[0] == nvinfer1::DataType::kHALF;
    SpinQuantizeQueryParams p = {};
    p.struct_bytes = sizeof(p);
    p.query = call.inputs[0];
    p.weights = call.input<float>(1);
    p.query_out = room.query;
    p.weights_out = room.weights;
    p.heads_total = heads_of(call.layout);
    p.query_dtype = half ? SPIN_QUERY_F16 : SPIN_QUERY_BF16;
    return launched(call, "quantize_query", spin_quantize_query(&p, call.stream));
}

bool score(const Call& call, const void* query, const float* weights, const Chosen& chosen) {
    const Layout& layout = call.layout;
    SpinScoreSlotsParams p = {};
    p.struct_bytes = sizeof(p);
    p.query = query;
    p.weights = weights;
    p.pages = call.inputs[2];
    p.page_table = call.input<int32_t>(3);
    p.visible_slots = chosen.visible_slots;
    p.block_list = chosen.block_list;
    p.block_count = chosen.block_count;
    p.places = chosen.places;
    p.scores = chosen.scores;
    p.num_pages = layout[kPages];
    p.page_table_stride = layout[kTableWidth];
    p.block_list_stride = call.config.blocks();
    p.score_stride = call.config.width();
    p.page_table_width = static_cast<int32_t>(layout[kTableWidth]);
    p.blocks = static_cast<int32_t>(call.config.blocks());
    p.sequences = static_cast<int32_t>(layout[kSequences]);
    p.rows = static_cast<int32_t>(layout[kRows]);
    p.heads = static_cast<int32_t>(layout[kHeads]);
    p.page_slots = static_cast<int32_t>(call.config.page_slots);
    p.block_size = static_cast<int32_t>(call.config.block_size);
    p.arithmetic = call.config.exact ? SPIN_SCORE_EXACT : SPIN_SCORE_FAST;
    return launched(call, "score_slots", spin_score_slots(&p, call.stream));
}

bool choose(const Call& call, const Chosen& chosen, int32_t* slots) {
    SpinTopkSlotsParams p = {};
    p.struct_bytes = sizeof(p);
    p.scores = chosen.scores;
    p.places = chosen.places;
    p.block_list = chosen.block_list;
    p.row_slots = chosen.row_slots;
    p.slots_out = slots;
    p.score_stride = call.config.width();
    p.entries = static_cast<int32_t>(call.layout[kSequences]);
    p.rows = static_cast<int32_t>(call.layout[kRows]);
    p.blocks = static_cast<int32_t>(call.config.blocks());
    p.block_size = static_cast<int32_t>(call.config.block_size);
    p.top_k = static_cast<int32_t>(call.config.top_k);
    return launched(call, "topk_slots", spin_topk_slots(&p, call.stream));
}

}  // namespace

QueryRoom::QueryRoom(Arena& arena, const Layout& layout) {
    if (layout.type[0] != nvinfer1::DataType::kFP8) {
        query = arena.take<char>(heads_of(layout) * layout[kKeyDim]);
        weights = arena.take<float>(heads_of(layout));
    }
}

bool score_and_choose(const Call& call, const QueryRoom& room, const Chosen& chosen,
                      int32_t* slots) {
    const bool wide = room.query != nullptr;
    if (wide && !quantize(call, room)) {
        return false;
    }
    const void* query = wide ? room.query : call.inputs[0];
    const float* weights = wide ? room.weights : call.input<float>(1);
    return score(call, query, weights, chosen) && choose(call, chosen, slots);
}

}  // namespace spin::trt
