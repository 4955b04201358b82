/* SPDX-License-Identifier: Apache-2.0 */
/* The best scored slots of each row, ties to the lower slot (end of SPEC 4). */
#ifndef SPIN_TOPK_SLOTS_H_
#define SPIN_TOPK_SLOTS_H_

#include "spin/common.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SpinTopkSlotsParams {
    int64_t struct_bytes;
    const float* scores;       /* [places, rows, score_stride] */
    const int64_t* places;     /* [entries]: place in `scores`; null: its own number */
    const int32_t* block_list; /* [entries, blocks]; null: every block, in order */
    const int32_t* row_slots;  /* [entries, rows]: scored slots of each row; <= 0: none */
    int32_t* slots_out;        /* out [entries * rows, top_k]: slots ascending, then -1 */
    int64_t score_stride;      /* a multiple of 8, holds every scored slot */
    int32_t entries;
    int32_t rows;
    int32_t blocks;     /* width of block_list, and capacity of a row in blocks */
    int32_t block_size; /* 8, 16, 32, 64, 128 */
    int32_t top_k;      /* 1 .. 2048 */
    int32_t full_rows;  /* 0: column c of a row is slot list[c / b] * b + c % b; 1: slot c */
} SpinTopkSlotsParams;

SPIN_EXPORT int spin_topk_slots(const SpinTopkSlotsParams* params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* SPIN_TOPK_SLOTS_H_ */
