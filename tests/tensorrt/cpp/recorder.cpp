// SPDX-License-Identifier: Apache-2.0
// The kernel library and CUDA as a plugin sees them that launches nothing and writes down what it
// would have launched.
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <vector>

#include "spin/spin.h"

#define RECORDER_EXPORT __attribute__((visibility("default")))

namespace {

struct Launch {
    std::string stem;
    std::string params;
};

std::vector<Launch> launches;

template <typename Params>
int record(const char* stem, const Params* params) {
    launches.push_back({stem, {reinterpret_cast<const char*>(params), sizeof(*params)}});
    return SPIN_OK;
}

}  // namespace

extern "C" {

RECORDER_EXPORT int recorder_count() {
    return static_cast<int>(launches.size());
}
RECORDER_EXPORT const char* recorder_stem(int i) {
    return launches[i].stem.c_str();
}
RECORDER_EXPORT const void* recorder_params(int i) {
    return launches[i].params.data();
}
RECORDER_EXPORT void recorder_clear() {
    launches.clear();
}

int spin_advance(const SpinAdvanceParams* p, cudaStream_t) {
    return record("advance", p);
}
int spin_predict_blocks(const SpinPredictBlocksParams* p, cudaStream_t) {
    return record("predict_blocks", p);
}
int spin_select_blocks(const SpinSelectBlocksParams* p, cudaStream_t) {
    return record("select_blocks", p);
}
int spin_quantize_query(const SpinQuantizeQueryParams* p, cudaStream_t) {
    return record("quantize_query", p);
}
int spin_score_slots(const SpinScoreSlotsParams* p, cudaStream_t) {
    return record("score_slots", p);
}
int spin_topk_slots(const SpinTopkSlotsParams* p, cudaStream_t) {
    return record("topk_slots", p);
}
int spin_observe_scores(const SpinObserveScoresParams* p, cudaStream_t) {
    return record("observe_scores", p);
}
const char* spin_error_string(int) {
    return "";
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
    return "";
}

}  // extern "C"
