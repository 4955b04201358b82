// SPDX-License-Identifier: Apache-2.0
// SpinIndexer: the whole decode step of a layer, its state in place.
#include "scoring.h"
#include "selection.h"
#include "spin/advance.h"

namespace spin::trt {
namespace {

using nvinfer1::DataType;

enum Input { kQuery, kWeights, kPagesIn, kTable, kLanesIn, kPositions, kIds, kV, kD, kScores };
enum Output { kSlotsOut, kCountOut, kVOut, kDOut, kScoresOut, kCompactOut, kBooksOut };

constexpr Port kInputs[] = {
    kQueryPorts[0],
    kQueryPorts[1],
    kQueryPorts[2],
    kQueryPorts[3],
    {"lanes", bit_of(DataType::kINT64), 1, {kSequences}},
    {"positions", bit_of(DataType::kINT64), 2, {kSequences, kRows}},
    {"sequence_ids", bit_of(DataType::kINT64), 1, {kSequences}},
    {"v", kStateTypes, 2, {kLanes, kVWidth}},
    {"d", kStateTypes, 2, {kLanes, kDWidth}, kV},
    {"scores", bit_of(DataType::kFLOAT), 3, {kPlaces, kRows, kScoreWidth}},
    {"compact_of_block", bit_of(DataType::kINT32), 2, {kPlaces, kBlocks}},
    {"books", bit_of(DataType::kINT64), 2, {kBookRows, kLanes}},
};

constexpr Port kOutputs[] = {
    {"slots", bit_of(DataType::kINT32), 3, {kSequences, kRows, kTopK}},
    {"block_count", bit_of(DataType::kINT32), 1, {kSequences}},
    {"v", kStateTypes, 2, {kLanes, kVWidth}, kV, 7},
    {"d", kStateTypes, 2, {kLanes, kDWidth}, kV, 8},
    {"scores", bit_of(DataType::kFLOAT), 3, {kPlaces, kRows, kScoreWidth}, -1, 9},
    {"compact_of_block", bit_of(DataType::kINT32), 2, {kPlaces, kBlocks}, -1, 10},
    {"books", bit_of(DataType::kINT64), 2, {kBookRows, kLanes}, -1, 11},
};

int64_t tiles_of(const Config& config) {
    return config.slots / SPIN_ADVANCE_TILE_SLOTS + 1;
}

int64_t tile_blocks_of(const Config& config) {
    return SPIN_ADVANCE_TILE_SLOTS / config.block_size;
}

struct Room {
    int64_t* places;
    uint8_t* warm;
    int32_t* observed_rows;
    float* tile_scores;
    float* block_scores = nullptr;  // of the poolings that do not split over tiles
    int32_t* block_list;
    int32_t* row_slots;
    int32_t* kept_slots;
    int32_t* visible_slots;
    QueryRoom query;

    Room(Arena& arena, const Config& config, const Layout& layout)
        : places(arena.take<int64_t>(layout[kSequences])),
          warm(arena.take<uint8_t>(layout[kSequences])),
          observed_rows(arena.take<int32_t>(layout[kSequences])),
          tile_scores(arena.take<float>(layout[kSequences] * layout[kRows] * tiles_of(config) *
                                        (tile_blocks_of(config) + 2))),
          block_list(arena.take<int32_t>(layout[kSequences] * config.blocks())),
          row_slots(arena.take<int32_t>(layout[kSequences] * layout[kRows])),
          kept_slots(arena.take<int32_t>(layout[kSequences])),
          visible_slots(arena.take<int32_t>(layout[kSequences])),
          query(arena, layout) {
        if (config.pooling != SPIN_POOLING_MAX) {
            block_scores = arena.take<float>(layout[kSequences] * layout[kRows] * config.blocks());
        }
    }
};

// What is remembered of each lane: pieces of one tensor.
struct Books {
    int64_t* tenant;
    int64_t* next;
    uint8_t* waits;
    uint8_t* warm;
    int64_t* positions;

    Books(int64_t* books, int64_t lanes)
        : tenant(books),
          next(books + lanes),
          waits(reinterpret_cast<uint8_t*>(books + 2 * lanes)),
          warm(waits + lanes),
          positions(books + 3 * lanes) {}
};

bool advance(const Call& call, const Room& room, const Books& books) {
    const Config& config = call.config;
    const Layout& layout = call.layout;
    SpinAdvanceParams p = {};
    p.struct_bytes = sizeof(p);
    p.v = call.outputs[kVOut];
    p.d = call.outputs[kDOut];
    p.lanes = call.input<int64_t>(kLanesIn);
    p.positions = call.input<int64_t>(kPositions);
    p.tenants = call.input<int64_t>(kIds);
    p.lane_tenant = books.tenant;
    p.lane_positions = books.positions;
    p.lane_waits = books.waits;
    p.lane_warm = books.warm;
    p.lane_next = books.next;
    p.scores = call.output<float>(kScoresOut);
    p.compact_of_block = call.output<int32_t>(kCompactOut);
    p.places = room.places;
    p.warm = room.warm;
    p.observed_rows = room.observed_rows;
    p.block_scores = room.tile_scores;
    p.slots = config.slots;
    p.v_stride = layout[kVWidth];
    p.d_stride = layout[kDWidth];
    p.tile_stride = SPIN_ADVANCE_TILE_SLOTS;
    p.score_stride = config.width();
    p.lane_stride = layout[kLanes];
    p.lanes_total = layout[kLanes];
    p.entries = static_cast<int32_t>(layout[kSequences]);
    p.sequences = p.entries;
    p.rows = static_cast<int32_t>(layout[kRows]);
    p.blocks = static_cast<int32_t>(config.blocks());
    p.tiles = static_cast<int32_t>(tiles_of(config));
    p.ratio = static_cast<int32_t>(config.ratio);
    p.block_size = static_cast<int32_t>(config.block_size);
    p.state_dtype = state_dtype(layout.type[kV]);
    p.row0_update = static_cast<int32_t>(config.row0_update);
    p.decay = static_cast<float>(config.ema_decay);
    p.gain = static_cast<float>(1.0 - config.ema_decay);
    return launched(call, "advance", spin_advance(&p, call.stream));
}

bool select(const Call& call, const Room& room, const Books& books) {
    SpinSelectBlocksParams p = {};
    fill_selection(call, p);
    const bool tiled = room.block_scores == nullptr;
    p.block_scores = tiled ? room.tile_scores : room.block_scores;
    p.tile_blocks = tiled ? static_cast<int32_t>(tile_blocks_of(call.config)) : 0;
    p.tiles = tiled ? static_cast<int32_t>(tiles_of(call.config)) : 0;
    p.positions = call.input<int64_t>(kPositions);
    p.warm = room.warm;
    p.sequence_ids = call.input<int64_t>(kIds);
    p.block_list = room.block_list;
    p.block_count = call.output<int32_t>(kCountOut);
    p.kept_slots = room.kept_slots;
    p.row_slots = room.row_slots;
    p.visible_slots = room.visible_slots;
    p.compact_of_block = call.output<int32_t>(kCompactOut);
    p.places = room.places;
    p.lane_positions = books.positions;
    p.lane_waits = books.waits;
    p.lane_warm = books.warm;
    p.lane_next = books.next;
    p.tenants = call.input<int64_t>(kIds);
    p.lane_tenant = books.tenant;
    p.lanes_total = call.layout[kLanes];
    return launched(call, "select_blocks", spin_select_blocks(&p, call.stream));
}

size_t workspace_bytes(const Config& config, const Layout& layout) {
    Arena arena(nullptr);
    Room(arena, config, layout);
    return arena.used();
}

bool run(const Call& call) {
    Arena arena(call.workspace);
    const Room room(arena, call.config, call.layout);
    const Books books(call.output<int64_t>(kBooksOut), call.layout[kLanes]);
    if (!advance(call, room, books)) {
        return false;
    }
    if (room.block_scores != nullptr &&
        !predict(call, call.outputs[kVOut], call.outputs[kDOut], call.layout.type[kV],
                 call.input<int64_t>(kLanesIn), call.input<int64_t>(kPositions),
                 room.block_scores)) {
        return false;
    }
    const Chosen chosen = {room.block_list, call.output<int32_t>(kCountOut),
                           room.row_slots,  room.visible_slots,
                           room.places,     call.output<float>(kScoresOut)};
    return select(call, room, books) &&
           score_and_choose(call, room.query, chosen, call.output<int32_t>(kSlotsOut));
}

}  // namespace

const Node kIndexerNode = {"SpinIndexer", kIndexer,        ports_of(kInputs, kOutputs),
                           always_agree,  workspace_bytes, run};

}  // namespace spin::trt
