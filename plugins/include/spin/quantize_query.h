/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A 16-bit query as score_slots wants it: e4m3, with one scale for each row and head.
 *
 *   scale = the power of two at or above max |q[d]| / 448      (the maximum is at least 1e-12)
 *   query_out[d] = q[d] / scale, to the nearest, ties to even
 *   weights_out = weights * scale
 *
 * As the indexers of TensorRT-LLM and DeepGEMM round with UE8M0 scales. Neither NaN nor infinities
 * count for the scale; infinities become +-448 and NaN stays NaN.
 */
#ifndef SPIN_QUANTIZE_QUERY_H_
#define SPIN_QUANTIZE_QUERY_H_

#include "spin/common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SPIN_QUERY_F16 = 0, SPIN_QUERY_BF16 = 1 };

typedef struct SpinQuantizeQueryParams {
    int64_t struct_bytes;
    const void* query;    /* f16 or bf16 [heads_total, 128] */
    const float* weights; /* [heads_total] */
    void* query_out;      /* out e4m3 [heads_total, 128] */
    float* weights_out;   /* out [heads_total]; may be `weights` */
    int64_t heads_total;  /* sequences * rows * heads */
    int32_t query_dtype;  /* SPIN_QUERY_* */
} SpinQuantizeQueryParams;

SPIN_EXPORT int spin_quantize_query(const SpinQuantizeQueryParams* params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif /* SPIN_QUANTIZE_QUERY_H_ */
