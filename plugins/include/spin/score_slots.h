/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The indexer's scores on the kept blocks of a paged fp8 key cache (SPEC 4):
 *
 *   z[s, r, c] = scale[slot] * sum_h weights[s, r, h] * relu(query[s, r, h] . key[slot])
 *
 * Column c of the compact output is slot block_list[s, c / b] * b + c % b with b = block_size.
 * Every row is scored on all listed slots that the last row sees; the top-k masks the rows that see
 * less. Scales are positive, so scaling the sum equals scaling inside the relu. Columns of no
 * visible slot are not written. A page, and a list or table entry, past a length is never read.
 */
#ifndef SPIN_SCORE_SLOTS_H_
#define SPIN_SCORE_SLOTS_H_

#include "spin/common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    /* Products are exact and sums as good as fp32 (errors near 1e-7 of the magnitude added up):
     * e4m3 widens to f16 without rounding. */
    SPIN_SCORE_EXACT = 0,
    /* SM90's fp8 tensor cores: quicker where arithmetic or power is the limit (several rows, large
     * batches), but they align addends to 14 bits (errors near 3e-4). Elsewhere the same as exact.
     */
    SPIN_SCORE_FAST = 1,
    /* Exact by instructions that every architecture has: the path of all but SM90. */
    SPIN_SCORE_PORTABLE = 2
};

typedef struct SpinScoreSlotsParams {
    int64_t struct_bytes;
    const void* query;            /* e4m3 [sequences, rows, heads, 128] */
    const float* weights;         /* [sequences, rows, heads], the query's scale included */
    const void* pages;            /* [num_pages, page_slots * 132] bytes: a page's keys (e4m3, 128
                                   * each), then its fp32 scales */
    const int32_t* page_table;    /* [sequences, page_table_width] */
    const int32_t* visible_slots; /* [sequences]: what the last row sees; 0 for padding */
    const int32_t* block_list;    /* [sequences, blocks] ascending; null: every block */
    const int32_t* block_count;   /* [sequences]; null with block_list */
    const int64_t* places;        /* [sequences]: place in `scores`; null: its own number */
    float* scores;                /* out [places, rows, score_stride] */
    int64_t num_pages;
    int64_t page_table_stride;
    int64_t block_list_stride; /* read when block_list is given */
    int64_t score_stride;      /* holds every listed slot of the longest possible sequence */
    int32_t page_table_width;
    int32_t blocks; /* capacity of block_list; read when block_list is given */
    int32_t sequences;
    int32_t rows;       /* 1 .. 8 */
    int32_t heads;      /* 32 or 64 */
    int32_t page_slots; /* 32 or 64 */
    int32_t block_size; /* 16, 32, 64, 128 */
    int32_t arithmetic; /* SPIN_SCORE_* */
} SpinScoreSlotsParams;

SPIN_EXPORT int spin_score_slots(const SpinScoreSlotsParams* params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* SPIN_SCORE_SLOTS_H_ */
