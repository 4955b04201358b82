/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Start of a decode step for all layers at once: resolve what the previous step's drafts came to,
 * let the averages learn from its scores, and predict this step's block scores, reading V and D
 * once. Pooling is max.
 *
 * What a sequence left behind waits under its lane, in any number of steps without it: positions,
 * scores and their places. With p0 this step's first position and p0' the waiting one's:
 *   a = p0 - p0' - 1 in 0 .. drafts'      -> rows 0 .. a of it are observed, the entry is warm;
 *   else lane_warm and lane_next == p0    -> warm, nothing observed;
 *   else                                  -> cold: V and D of the lane become zero.
 * Where `tenants` are given and a lane's is another one than at its last step, nothing of it
 * counts: the entry is cold. An entry without a lane, without a position, or with one past the
 * lane's `lane_slots` takes the place of its batch row behind those of the lanes; it is cold and
 * leaves nothing behind. Layers share these places, so its scores must be used before those of the
 * next layer are written.
 *
 * The lane_* arrays are the books. They are only read here; spin_select_blocks writes them
 * afterwards, what lane_slots and tenants change in them included. To make a lane cold from
 * outside, set lane_waits and lane_warm to 0 and lane_next to -1.
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
    void* v;                         /* in/out [lanes_total, slots], by the strides below */
    void* d;                         /* in/out [lanes_total, slots + 1] */
    const int64_t* lanes;            /* [sequences], distinct; -1: no state, cold */
    const int64_t* positions;        /* [sequences, rows]; -1 pads */
    const int64_t* tenants;          /* [sequences] or null: who has the lane, since when */
    const int64_t* lane_tenant;      /* [lanes_total]; null with tenants */
    const int64_t* lane_slots;       /* [lane_stride]: slots of a lane with memory; null: all */
    const int64_t* lane_positions;   /* [lanes_total, rows] of the step that waits */
    const uint8_t* lane_waits;       /* [lanes_total] */
    const uint8_t* lane_warm;        /* [lanes_total] */
    const int64_t* lane_next;        /* [lanes_total] */
    const float* scores;             /* [lanes_total + sequences, rows, score_stride] */
    const int32_t* compact_of_block; /* [lanes_total + sequences, blocks] */
    int64_t* places;                 /* out [entries]: lane, or lanes_total + batch row */
    uint8_t* warm;                   /* out [entries] */
    int32_t* observed_rows;          /* out [entries]: rows that were observed */
    /* out [entries, rows, tiles, tile_blocks + 2], tile_blocks = tile slots / block_size. Tile t
     * holds at 2 + k what it knows of block t * tile_blocks + k, and at 0 and 1 what it knows of
     * the two blocks before its own. A block's score is the maximum of both places. Tiles up to
     * query slot / tile slots of the last row are written, for warm entries only. */
    float* block_scores;
    int64_t slots; /* capacity N; D holds N + 1 */
    /* Elements, multiples of 8: slot n of lane l in layer y lies at
     * l * v_stride + y * v_layer_stride + n / tile slots * tile_stride + n % tile slots. */
    int64_t v_stride;
    int64_t v_layer_stride;
    int64_t d_stride;
    int64_t d_layer_stride;
    int64_t tile_stride;  /* tile slots, where a lane's averages are one piece */
    int64_t score_stride; /* multiple of 8, at least blocks * block_size */
    int64_t lane_stride;  /* lanes a layer: what entries of further layers add to their lane */
    int64_t lanes_total;  /* layers * lane_stride, or more */
    int32_t entries;      /* layers * sequences */
    int32_t sequences;    /* entries a layer */
    int32_t rows;         /* 1 .. 8 */
    int32_t blocks;       /* ceil(slots / block_size) */
    int32_t tiles;        /* slots / tile slots + 1, rounded down */
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
