// SPDX-License-Identifier: Apache-2.0
// CUDA as a plugin sees it that runs nothing: launches, streams, captures and graphs. The file that
// includes this says which calls fail, and is told what would have run.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "status.h"

namespace played {

// A kernel that would have run. `params` is a copy, taken when CUDA takes its own.
struct Kernel {
    std::string stem, params;
    unsigned blocks, cluster;
    bool in_graph;
};
using Graph = std::deque<Kernel>;  // which stay where they are

// Given by the including file.
bool fails(const char* call);
void ran(const Kernel& kernel);

struct Stem {
    const char* name;
    size_t bytes;
};
inline std::map<const void*, Stem> stems;  // by their kernel's address
inline std::set<void*> streams, graphs;    // alive
inline std::map<void*, int> captured;      // streams, and what was launched onto them
inline std::set<void*> uploaded;           // graphs that run
inline cudaError_t last_error = cudaSuccess;
inline thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

inline cudaError_t give(const char* call, bool holds = true) {
    const cudaError_t error = holds && !fails(call) ? cudaSuccess : cudaErrorUnknown;
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

// What may allocate or free: as if some other stream were being captured all the time.
inline cudaError_t give_relaxed(const char* call, bool holds = true) {
    return give(call, holds && mode == cudaStreamCaptureModeRelaxed);
}

inline Kernel kernel_of(const cudaKernelNodeParams& params) {
    const Stem& stem = stems.at(params.func);
    const char* const given = static_cast<const char*>(params.kernelParams[0]);
    return {stem.name, {given, stem.bytes}, params.gridDim.x, 1, false};
}

template <typename Params>
void kernel(Params) {
    volatile size_t bytes = sizeof(Params);
    (void)bytes;
}

// Launches a stem's kernel as the kernel library does.
template <typename Params>
int launch(const char* stem, const Params& params, int64_t blocks, int cluster,
           cudaStream_t stream) {
    if (blocks == 0)
        return SPIN_OK;
    stems[reinterpret_cast<const void*>(kernel<Params>)] = {stem, sizeof(Params)};
    return spin::launch(kernel<Params>, dim3(static_cast<unsigned>(blocks)), 32, 0, cluster, stream,
                        params);
}

// As topk_slots chooses it.
inline int cluster_of(int64_t rows) {
    return rows <= 12 ? 8 : rows <= 24 ? 4 : rows <= 132 ? 2 : 1;
}

}  // namespace played

extern "C" {

cudaError_t cudaGetLastError() {
    const cudaError_t error = played::last_error;
    played::last_error = cudaSuccess;
    return error;
}
const char* cudaGetErrorString(cudaError_t) {
    return "an error";
}
cudaError_t cudaGetDevice(int* id) {
    *id = 0;
    return played::give("cudaGetDevice");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 9;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
    if (played::give("cudaLaunchKernelExC") != cudaSuccess)
        return cudaErrorUnknown;
    cudaKernelNodeParams params = {};
    params.func = const_cast<void*>(function);
    params.gridDim = config->gridDim;
    params.kernelParams = arguments;
    played::Kernel kernel = played::kernel_of(params);
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            kernel.cluster = config->attrs[i].val.clusterDim.x;
    }
    const auto captured = played::captured.find(config->stream);
    if (captured != played::captured.end())
        ++captured->second;
    else
        played::ran(kernel);
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(played::mode, *mode);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    if (played::give_relaxed("cudaStreamCreateWithFlags") != cudaSuccess)
        return cudaErrorUnknown;
    *stream = reinterpret_cast<cudaStream_t>(new char);
    played::streams.insert(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete reinterpret_cast<char*>(stream);
    return played::give_relaxed("cudaStreamDestroy", played::streams.erase(stream) == 1);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const bool captured = played::captured.count(stream) != 0;
    *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return played::give("cudaStreamIsCapturing");
}
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
    if (played::give_relaxed("cudaGraphCreate") != cudaSuccess)
        return cudaErrorUnknown;
    auto* const made = new played::Graph;
    *graph = reinterpret_cast<cudaGraph_t>(made);
    played::graphs.insert(made);
    return cudaSuccess;
}
// Takes a chain: each node after the one made before it.
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                   const cudaGraphNode_t* after, size_t count,
                                   const cudaKernelNodeParams* params) {
    auto& kernels = *reinterpret_cast<played::Graph*>(graph);
    const bool chained =
        kernels.empty()
            ? count == 0
            : count == 1 && *after == reinterpret_cast<cudaGraphNode_t>(&kernels.back());
    if (played::give("cudaGraphAddKernelNode", chained) != cudaSuccess)
        return cudaErrorUnknown;
    kernels.push_back(played::kernel_of(*params));
    *node = reinterpret_cast<cudaGraphNode_t>(&kernels.back());
    return cudaSuccess;
}
cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node, cudaLaunchAttributeID id,
                                            const cudaLaunchAttributeValue* value) {
    const bool known = id == cudaLaunchAttributeClusterDimension;
    if (played::give("cudaGraphKernelNodeSetAttribute", known) != cudaSuccess)
        return cudaErrorUnknown;
    reinterpret_cast<played::Kernel*>(node)->cluster = value->clusterDim.x;
    return cudaSuccess;
}
// A graph that runs shares its nodes with the one that it was made from.
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
    if (played::give_relaxed("cudaGraphInstantiate") != cudaSuccess)
        return cudaErrorUnknown;
    auto* const made = new cudaGraph_t(graph);
    *runnable = reinterpret_cast<cudaGraphExec_t>(made);
    played::graphs.insert(made);
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t runnable, cudaStream_t) {
    played::uploaded.insert(runnable);
    return played::give_relaxed("cudaGraphUpload");
}
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
    if (played::give("cudaGraphExecKernelNodeSetParams") != cudaSuccess)
        return cudaErrorUnknown;
    auto& kernel = *reinterpret_cast<played::Kernel*>(node);
    const unsigned cluster = kernel.cluster;
    kernel = played::kernel_of(*params);
    kernel.cluster = cluster;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t) {
    // An upload is what would allocate here.
    if (played::give("cudaGraphLaunch", played::uploaded.count(runnable) == 1) != cudaSuccess)
        return cudaErrorUnknown;
    const cudaGraph_t graph = *reinterpret_cast<cudaGraph_t*>(runnable);
    for (played::Kernel kernel : *reinterpret_cast<played::Graph*>(graph)) {
        kernel.in_graph = true;
        played::ran(kernel);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable) {
    if (played::mode != cudaStreamCaptureModeRelaxed)
        return played::give_relaxed("cudaGraphExecDestroy");  // and it stays
    auto* const made = reinterpret_cast<cudaGraph_t*>(runnable);
    const bool alive = played::graphs.erase(made) == 1;
    played::uploaded.erase(made);
    delete made;
    return played::give_relaxed("cudaGraphExecDestroy", alive);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    if (played::mode != cudaStreamCaptureModeRelaxed)
        return played::give_relaxed("cudaGraphDestroy");  // and it stays
    auto* const made = reinterpret_cast<played::Graph*>(graph);
    const bool alive = played::graphs.erase(made) == 1;
    delete made;
    return played::give_relaxed("cudaGraphDestroy", alive);
}

}  // extern "C"
