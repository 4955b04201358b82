/* SPDX-License-Identifier: Apache-2.0 */
/* The averages learn from the scores of the accepted rows (SPEC 5). */
#ifndef SPIN_OBSERVE_SCORES_H_
#define SPIN_OBSERVE_SCORES_H_

#include "spin/common.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SpinObserveScoresParams {
    int64_t struct_bytes;
    void* v;                         /* in/out [lanes_total, v_stride] */
    void* d;                         /* in/out [lanes_total, d_stride] */
    const int64_t* lanes;            /* [entries], distinct; -1: nothing to update */
    const int64_t* positions;        /* [entries, rows] */
    const int64_t* accepted;         /* [entries]; accepted drafts, negative observes nothing */
    const float* scores;             /* [entries * rows, score_stride] */
    const int32_t* compact_of_block; /* [entries, blocks]; -1 = not scored */
    int64_t slots;                   /* capacity N; D holds N + 1 */
    int64_t v_stride;                /* multiple of 8, at least slots */
    int64_t d_stride;                /* multiple of 8, at least slots + 1 */
    int64_t score_stride;            /* multiple of 8 */
    int64_t lanes_total;             /* lanes of v and d; a lane outside them is none */
    int32_t entries;
    int32_t rows; /* 1 .. 8 */
    int32_t blocks;
    int32_t ratio;
    int32_t block_size;
    int32_t state_dtype;
    int32_t full_rows;   /* 1: column of a slot is the slot itself; 0: compact columns */
    int32_t row0_update; /* 1: only row 0 learns */
    float decay;         /* alpha */
    float gain;          /* 1 - alpha, rounded once from double */
} SpinObserveScoresParams;

SPIN_EXPORT int spin_observe_scores(const SpinObserveScoresParams* params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* SPIN_OBSERVE_SCORES_H_ */
