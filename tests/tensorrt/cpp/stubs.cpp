// SPDX-License-Identifier: Apache-2.0
// The kernel library and CUDA as the fuzzer's plugin sees them: arguments are looked at, as far as
// that needs no device, nothing is launched, and any call may fail.
#include <cstdio>
#include <cstdlib>

#include "played_cuda.h"
#include "spin/spin.h"

namespace {

void demand(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "a launch with a wrong %s\n", what);
        std::abort();
    }
}

template <typename Params>
int check(const char* stem, const Params* params, int64_t count, int cluster, cudaStream_t stream) {
    demand(params->struct_bytes == static_cast<int64_t>(sizeof(Params)), "struct_bytes");
    demand(count >= 0, "count");
    return std::rand() % 16 == 0 ? spin::fail(SPIN_ERROR_RANGE, stem, "nothing")
                                 : played::launch(stem, *params, count, cluster, stream);
}

}  // namespace

bool played::fails(const char*) {
    return std::rand() % 16 == 0;
}
void played::ran(const Kernel& kernel) {
    const bool chosen = kernel.stem == "topk_slots";
    demand(chosen || kernel.cluster == 1, "cluster");
    demand(!chosen || kernel.cluster == static_cast<unsigned>(cluster_of(kernel.blocks)),
           "cluster");
}

extern "C" {

int spin_advance(const SpinAdvanceParams* p, cudaStream_t s) {
    demand(p->score_stride >= int64_t{p->blocks} * p->block_size, "score_stride");
    demand(p->v_stride >= p->slots && p->d_stride > p->slots, "stride");
    demand(p->entries == 0 || (p->block_scores != nullptr && p->places != nullptr), "workspace");
    return check("advance", p, p->entries, 1, s);
}
int spin_predict_blocks(const SpinPredictBlocksParams* p, cudaStream_t s) {
    demand(p->entries == 0 || p->block_scores != nullptr, "workspace");
    return check("predict_blocks", p, p->entries, 1, s);
}
int spin_select_blocks(const SpinSelectBlocksParams* p, cudaStream_t s) {
    demand(p->layers == nullptr && p->layer_entries == p->entries, "layers");
    demand(p->layer >= 0 && p->layer < 1024, "layer");
    return check("select_blocks", p, p->entries, 1, s);
}
int spin_score_slots(const SpinScoreSlotsParams* p, cudaStream_t s) {
    return check("score_slots", p, p->sequences, 1, s);
}
int spin_topk_slots(const SpinTopkSlotsParams* p, cudaStream_t s) {
    const int64_t rows = int64_t{p->entries} * p->rows;
    return check("topk_slots", p, rows, played::cluster_of(rows), s);
}
int spin_observe_scores(const SpinObserveScoresParams* p, cudaStream_t s) {
    return check("observe_scores", p, p->entries, 1, s);
}
int spin_quantize_query(const SpinQuantizeQueryParams* p, cudaStream_t s) {
    return check("quantize_query", p, p->heads_total, 1, s);
}

cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
    return std::rand() % 8 == 0 ? cudaErrorInvalidValue : cudaSuccess;
}

}  // extern "C"
