// SPDX-License-Identifier: Apache-2.0
// The current query's part of a step, which SpinIndexer and SpinSparseIndexer share.
#pragma once

#include "node.h"

namespace spin::trt {

constexpr unsigned kQueryTypes = bit_of(nvinfer1::DataType::kFP8) |
                                 bit_of(nvinfer1::DataType::kHALF) |
                                 bit_of(nvinfer1::DataType::kBF16);
constexpr unsigned kPageTypes = bit_of(nvinfer1::DataType::kINT32) |
                                bit_of(nvinfer1::DataType::kINT8) |
                                bit_of(nvinfer1::DataType::kFP8);

// The tensors that both nodes begin with, at these places.
constexpr Port kQueryPorts[] = {
    {"query", kQueryTypes, 4, {kSequences, kRows, kHeads, kKeyDim}},
    {"weights", bit_of(nvinfer1::DataType::kFLOAT), 3, {kSequences, kRows, kHeads}},
    {"pages", kPageTypes, 2, {kPages, kPageBytes}},
    {"page_table", bit_of(nvinfer1::DataType::kINT32), 2, {kSequences, kTableWidth}},
};

// Room for a quantised query; none is taken where the query comes as e4m3.
struct QueryRoom {
    void* query = nullptr;
    float* weights = nullptr;

    QueryRoom(Arena& arena, const Layout& layout);
};

// What a step has chosen and where its scores go.
struct Chosen {
    const int32_t* block_list;
    const int32_t* block_count;
    const int32_t* row_slots;
    const int32_t* visible_slots;
    const int64_t* places;  // null: in order
    float* scores;
};

// Quantises the query where that is needed, scores the chosen blocks and writes the best slots.
bool score_and_choose(const Call& call, const QueryRoom& room, const Chosen& chosen,
                      int32_t* slots);

}  // namespace spin::trt
