/* SPDX-License-Identifier: Apache-2.0 */
/* Block scores from the averages alone (SPEC 4, steps 2 and 3). */
#ifndef SPIN_PREDICT_BLOCKS_H_
#define SPIN_PREDICT_BLOCKS_H_

#include "spin/common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SPIN_POOLING_MAX = 0, SPIN_POOLING_TOP4 = 1, SPIN_POOLING_MEAN = 2 };

typedef struct SpinPredictBlocksParams {
    int64_t struct_bytes;
    const void* v;            /* [lanes_total, v_stride] */
    const void* d;            /* [lanes_total, d_stride] */
    const int64_t* lanes;     /* [sequences]; -1: no state, averages read as zero */
    const int64_t* positions; /* [sequences, rows]; -1 pads */
    float* block_scores;      /* out [entries, rows, blocks]; -inf where a row sees nothing */
    int64_t slots;            /* capacity N; D holds N + 1 */
    int64_t v_stride;
    int64_t d_stride;
    int64_t lane_stride; /* lanes a layer: what entries of further layers add to their lane */
    int32_t entries;     /* layers * sequences */
    int32_t sequences;   /* entries a layer */
    int32_t rows;        /* 1 .. 8 */
    int32_t blocks;      /* ceil(slots / block_size) or more */
    int32_t ratio;       /* tokens a slot */
    int32_t block_size;  /* 8, 16, 32, 64, 128 */
    int32_t state_dtype; /* SPIN_STATE_* */
    int32_t pooling;     /* SPIN_POOLING_*; the sums of top4 and mean run in slot order */
} SpinPredictBlocksParams;

SPIN_EXPORT int spin_predict_blocks(const SpinPredictBlocksParams* params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* SPIN_PREDICT_BLOCKS_H_ */
