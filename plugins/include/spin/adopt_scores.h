/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a host's own kernels found on the compacted blocks, in SPIN's terms: its scores go to where
 * the next step observes them, and the columns that its top-k chose become slots of the sequence.
 */
#ifndef SPIN_ADOPT_SCORES_H_
#define SPIN_ADOPT_SCORES_H_

#include "spin/common.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SpinAdoptScoresParams {
    int64_t struct_bytes;
    const float* host_scores;  /* [entries * host_rows, host_stride], columns in compact order */
    const int32_t* block_list; /* [entries, blocks]: kept ids ascending, then -1 */
    const int32_t* row_slots; /* [entries, rows]: kept slots each row sees; only these are copied */
    const int64_t* places;    /* [entries]: place in `scores` */
    float* scores;            /* out [places, rows, score_stride] */
    int32_t* columns;         /* in/out [entries * host_rows, top_k] or null; -1, and every column
                               * that names no kept block, becomes -1 */
    int64_t host_stride;
    int64_t score_stride;
    int32_t host_columns; /* columns that host_scores has: 0 .. host_stride */
    int32_t entries;
    int32_t host_rows; /* 1 .. rows */
    int32_t rows;      /* 1 .. 8 */
    int32_t blocks;
    int32_t block_size; /* 8, 16, 32, 64, 128 */
    int32_t top_k;      /* read when columns are given */
} SpinAdoptScoresParams;

SPIN_EXPORT int spin_adopt_scores(const SpinAdoptScoresParams* params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* SPIN_ADOPT_SCORES_H_ */
