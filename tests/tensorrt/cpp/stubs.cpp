// SPDX-License-Identifier: Apache-2.0
// The kernel library and CUDA as the fuzzer's plugin sees them: arguments are looked at, as far as
// that needs no device, and nothing is launched.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "spin/spin.h"

namespace {

void demand(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "a launch with a wrong %s\n", what);
        std::abort();
    }
}

template <typename Params>
int check(const Params* params, int64_t count) {
    demand(params->struct_bytes == static_cast<int64_t>(sizeof(Params)), "struct_bytes");
    demand(count >= 0, "count");
    return std::rand() % 8 == 0 ? SPIN_ERROR_CUDA : SPIN_OK;  // launches may fail at any place
}

}  // namespace

extern "C" {

int spin_advance(const SpinAdvanceParams* p, cudaStream_t) {
    demand(p->score_stride >= int64_t{p->blocks} * p->block_size, "score_stride");
    demand(p->v_stride >= p->slots && p->d_stride > p->slots, "stride");
    demand(p->entries == 0 || (p->block_scores != nullptr && p->places != nullptr), "workspace");
    return check(p, p->entries);
}
int spin_predict_blocks(const SpinPredictBlocksParams* p, cudaStream_t) {
    demand(p->entries == 0 || p->block_scores != nullptr, "workspace");
    return check(p, p->entries);
}
int spin_select_blocks(const SpinSelectBlocksParams* p, cudaStream_t) {
    demand(p->layers == nullptr && p->layer_entries == p->entries, "layers");
    demand(p->layer >= 0 && p->layer < 1024, "layer");
    return check(p, p->entries);
}
int spin_score_slots(const SpinScoreSlotsParams* p, cudaStream_t) {
    return check(p, p->sequences);
}
int spin_topk_slots(const SpinTopkSlotsParams* p, cudaStream_t) {
    return check(p, p->entries);
}
int spin_observe_scores(const SpinObserveScoresParams* p, cudaStream_t) {
    return check(p, p->entries);
}
int spin_quantize_query(const SpinQuantizeQueryParams* p, cudaStream_t) {
    return check(p, p->heads_total);
}
const char* spin_error_string(int) {
    return "refused";
}

cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
    return std::rand() % 8 == 0 ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
    return "an error";
}

}  // extern "C"
