// SPDX-License-Identifier: Apache-2.0
// The kernel library and CUDA as a plugin sees them that launches nothing and writes down what it
// would have launched.
#include <cstring>
#include <string>
#include <vector>

#include "played_cuda.h"
#include "spin/spin.h"

#define RECORDER_EXPORT __attribute__((visibility("default")))

namespace {

std::vector<played::Kernel> launches;
std::string failing, refusing;

template <typename Params>
int record(const char* stem, const Params* params, int64_t blocks, int cluster,
           cudaStream_t stream) {
    return refusing == stem ? spin::fail(SPIN_ERROR_RANGE, stem, "nothing")
                            : played::launch(stem, *params, blocks, cluster, stream);
}

}  // namespace

bool played::fails(const char* call) {
    return failing == call;
}
void played::ran(const Kernel& kernel) {
    launches.push_back(kernel);
}

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
RECORDER_EXPORT int recorder_bytes(int i) {
    return static_cast<int>(launches[i].params.size());
}
RECORDER_EXPORT int recorder_cluster(int i) {
    return static_cast<int>(launches[i].cluster);
}
RECORDER_EXPORT int recorder_in_graph(int i) {
    return launches[i].in_graph;
}
RECORDER_EXPORT void recorder_clear() {
    launches.clear();
}
// The call of CUDA that fails from now on, and the stem that refuses; empty: none.
RECORDER_EXPORT void recorder_fail(const char* call) {
    failing = call;
}
RECORDER_EXPORT void recorder_refuse(const char* stem) {
    refusing = stem;
}
// Streams and graphs that were made and are not gone.
RECORDER_EXPORT int recorder_alive() {
    return static_cast<int>(played::streams.size() + played::graphs.size());
}
RECORDER_EXPORT int recorder_take_error() {
    return cudaGetLastError();
}
// Begins to capture a stream, or ends it: the kernels captured.
RECORDER_EXPORT void recorder_capture(cudaStream_t stream) {
    played::captured[stream] = 0;
}
RECORDER_EXPORT int recorder_end_capture(cudaStream_t stream) {
    const int launched = played::captured.at(stream);
    played::captured.erase(stream);
    return launched;
}

int spin_advance(const SpinAdvanceParams* p, cudaStream_t s) {
    return record("advance", p, p->entries, 1, s);
}
int spin_predict_blocks(const SpinPredictBlocksParams* p, cudaStream_t s) {
    return record("predict_blocks", p, p->entries, 1, s);
}
int spin_select_blocks(const SpinSelectBlocksParams* p, cudaStream_t s) {
    return record("select_blocks", p, p->entries, 1, s);
}
int spin_quantize_query(const SpinQuantizeQueryParams* p, cudaStream_t s) {
    return record("quantize_query", p, p->heads_total, 1, s);
}
int spin_score_slots(const SpinScoreSlotsParams* p, cudaStream_t s) {
    return record("score_slots", p, p->sequences, 1, s);
}
int spin_topk_slots(const SpinTopkSlotsParams* p, cudaStream_t s) {
    const int64_t rows = int64_t{p->entries} * p->rows;
    return record("topk_slots", p, rows, played::cluster_of(rows), s);
}
int spin_observe_scores(const SpinObserveScoresParams* p, cudaStream_t s) {
    return record("observe_scores", p, p->entries, 1, s);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

}  // extern "C"
