/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Start of a decode step for all layers at once: resolve what the previous step's drafts came to,
 * let the averages learn from its scores, and predict this step's block scores, reading V and D
 * once. Pooling is max.
 *
 * Per entry, with p0 the step's first position and e' the entry that last planned its lane:
 *   a = p0 - p0' - 1 in 0 .. drafts'      -> rows 0 .. a of e' are observed, the entry is warm;
 *   else lane_warm and lane_next == p0    -> warm, nothing observed;
 *   else                                  -> cold: V and D of the lane become zero.
 * The lane_* and plan_* arrays are only read here; spin_select_blocks writes them afterwards.
 * To make a lane cold from outside, set lane_entry and lane_next to -1 and lane_warm to 0.
 */
#ifndef SPIN_ADVANCE_H_
#define SPIN_ADVANCE_H_

#include "spin/common.h"

/* Slots that one tile of block_scores covers. */
#define SPIN_ADVANCE_TILE_SLOTS 256

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SpinAdvanceParams {
    int64_t struct_bytes;
    void* v;                         /* in/out [lanes_total, v_stride] */
    void* d;                         /* in/out [lanes_total, d_stride] */
    const int64_t* lanes;            /* [sequences], distinct; -1: no state, cold */
    const int64_t* positions;        /* [sequences, rows]; -1 pads */
    const int64_t* plan_positions;   /* [plan_entries, rows], previous step */
    const int64_t* plan_lanes;       /* [plan_entries] */
    const int32_t* lane_entry;       /* [lanes_total] */
    const uint8_t* lane_warm;        /* [lanes_total] */
    const int64_t* lane_next;        /* [lanes_total] */
    const float* scores;             /* [plan_entries * rows, score_stride], previous step */
    const int32_t* compact_of_block; /* [plan_entries, blocks], previous step */
    uint8_t* warm;                   /* out [entries] */
    int32_t* observed_rows;          /* out [entries]: rows that were observed */
    int32_t* previous_entry;         /* out [entries]: e', or -1 */
    /* out [entries, rows, tiles, tile_blocks + 2], tile_blocks = tile slots / block_size. Tile t
     * holds at 2 + k what it knows of block t * tile_blocks + k, and at 0 and 1 what it knows of
     * the two blocks before its own. A block's score is the maximum of both places. Tiles up to
     * query slot / tile slots of the last row are written, for warm entries only. */
    float* block_scores;
    int64_t slots;        /* capacity N; D holds N + 1 */
    int64_t v_stride;     /* multiple of 8, at least slots */
    int64_t d_stride;     /* multiple of 8, at least slots + 1 */
    int64_t score_stride; /* multiple of 8, at least blocks * block_size */
    int64_t lane_stride;  /* added to the lane for every further layer */
    int64_t lanes_total;
    int32_t plan_entries;
    int32_t entries;   /* layers * sequences */
    int32_t sequences; /* entries a layer */
    int32_t rows;      /* 1 .. 8 */
    int32_t blocks;    /* ceil(slots / block_size) */
    int32_t tiles;     /* slots / tile slots + 1, rounded down */
    int32_t ratio;
    int32_t block_size;
    int32_t state_dtype;
    int32_t row0_update; /* 1: only row 0 learns */
    float decay;         /* alpha */
    float gain;          /* 1 - alpha, rounded once from double */
} SpinAdvanceParams;

SPIN_EXPORT int spin_advance(const SpinAdvanceParams* params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* SPIN_ADVANCE_H_ */
