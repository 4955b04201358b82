/* SPDX-License-Identifier: Apache-2.0 */
/* Which blocks a step keeps (SPEC 4, steps 4 to 9, and SPEC 6), and the lists made from them. */
#ifndef SPIN_SELECT_BLOCKS_H_
#define SPIN_SELECT_BLOCKS_H_

#include "spin/common.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SpinSelectBlocksParams {
    int64_t struct_bytes;
    /* Ranked part's scores. tile_blocks = 0: [entries, rows, blocks]. Otherwise the tiled layout
     * of spin_advance: [entries, rows, tiles, tile_blocks + 2], see advance.h. */
    const float* block_scores;
    const int64_t* positions;    /* [sequences, rows]; -1 pads */
    const uint8_t* warm;         /* [entries]; 0 keeps every visible block */
    const int64_t* sequence_ids; /* [sequences] */
    const int64_t* layers;       /* [entries / layer_entries], decoder-layer index; null: `layer` */
    /* [entries / layer_entries], the target of each layer; a number out of 0 .. 999999 is taken as
     * the nearest of them. Null: `sparsity_ppm` */
    const int32_t* layer_sparsity_ppm;
    const int32_t* page_table; /* [sequences, page_table_stride] or null */

    int32_t* block_list;    /* out [entries, blocks]: kept ids ascending, then -1 */
    int32_t* block_count;   /* out [entries] */
    int32_t* kept_slots;    /* out [entries]: kept slots the last row sees, partial tail last */
    int32_t* row_slots;     /* out [entries, rows]: kept slots each row sees (a prefix) */
    int32_t* visible_slots; /* out [entries] or null: slots the last row sees, kept or not */
    /* out [entries, blocks]: place in block_list, -1 = not kept; where `places` are given, in
     * their order: [lanes_total + sequences, blocks] */
    int32_t* compact_of_block;
    int32_t* compact_pages; /* out [entries, compact_pages_stride] or null; 0 past the end */
    uint8_t* block_mask;    /* out [entries, blocks] or null: the shared mask U */
    uint8_t* row_masks;     /* out [entries, rows, blocks] or null: each row's own choice */
    uint8_t* explored_mask; /* out [entries, blocks] or null */

    /* What the next spin_advance needs; all null, or the first five given. See advance.h. A lane
     * whose entry has a position, but not the lane as its place, outgrew lane_slots: it no longer
     * waits and is cold. */
    const int64_t* places;   /* [entries]: lane, or lanes_total and more for none */
    int64_t* lane_positions; /* out [lanes_total, rows]: of the step that waits */
    uint8_t* lane_waits;     /* out [lanes_total]: 1, its scores are to be observed */
    uint8_t* lane_warm;      /* out [lanes_total] */
    int64_t* lane_next;      /* out [lanes_total]: token position of a warm lane's step, or -1 */
    const int64_t* lanes;    /* [sequences]; null where spin_advance has no lane_slots */
    const int64_t* tenants;  /* [sequences]; null where spin_advance has none */
    int64_t* lane_tenant;    /* out [lanes_total]; null with tenants */

    uint64_t seed;
    int64_t lane_stride; /* lanes a layer; read when lanes are given */
    int64_t lanes_total;
    int64_t page_table_stride;
    int64_t compact_pages_stride;
    int32_t page_table_width; /* pages a sequence may have in page_table */
    int32_t entries;          /* layers * sequences */
    int32_t sequences;        /* entries a layer */
    int32_t layer_entries;    /* entries sharing a layer: all, if `layers` is null */
    int32_t layer;            /* decoder-layer index of every entry, read when layers is null */
    int32_t rows;             /* 1 .. 8 */
    int32_t blocks;           /* capacity, at most 16384 */
    int32_t tile_blocks;
    int32_t tiles;
    int32_t ratio;
    int32_t block_size; /* 8, 16, 32, 64, 128 */
    int32_t top_k;
    int32_t sparsity_ppm; /* 0 .. 999999, read when layer_sparsity_ppm is null */
    int32_t exploration_ppm;
    int32_t row0_mask;  /* 1: row 0's blocks and the last row's newest; 0: union of the rows */
    int32_t page_slots; /* 32 or 64, at most block_size; read when page_table is given */
} SpinSelectBlocksParams;

SPIN_EXPORT int spin_select_blocks(const SpinSelectBlocksParams* params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* SPIN_SELECT_BLOCKS_H_ */
