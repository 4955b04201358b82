// SPDX-License-Identifier: Apache-2.0
// CUDA as a plugin sees it that runs nothing: launches, streams, captures and graphs. The file that
// includes this says which calls fail, and is told what would have run.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "status.h"

namespace played {

// A kernel that would have run. `params` is a copy, taken when CUDA takes its own.
struct Kernel {
    std::string stem, params;
    dim3 grid, block;
    unsigned cluster;
    bool in_graph;
};

// Given by the including file.
bool fails(const char* call);
void ran(const Kernel& kernel);

struct Stem {
    const char* name;
    size_t bytes;
};
inline std::map<const void*, Stem> stems;  // by their kernel's address
inline std::set<void*> streams, graphs;    // alive
inline std::set<void*> captured;           // streams
inline std::map<void*, std::vector<Kernel>> recorded;
inline cudaError_t last_error = cudaSuccess;

inline cudaError_t give(const char* call, bool holds = true) {
    const cudaError_t error = holds && !fails(call) ? cudaSuccess : cudaErrorUnknown;
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

inline Kernel kernel_of(const void* function, void** arguments) {
    const Stem& stem = stems.at(function);
    return {stem.name, {static_cast<const char*>(arguments[0]), stem.bytes}, {}, {}, 1, false};
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
    played::Kernel kernel = played::kernel_of(function, arguments);
    kernel.grid = config->gridDim;
    kernel.block = config->blockDim;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            kernel.cluster = config->attrs[i].val.clusterDim.x;
    }
    if (played::captured.count(config->stream) != 0)
        played::recorded[config->stream].push_back(kernel);
    else
        played::ran(kernel);
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    const cudaStreamCaptureMode before = current;
    current = *mode;
    *mode = before;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    if (played::give("cudaStreamCreateWithFlags") != cudaSuccess)
        return cudaErrorUnknown;
    *stream = reinterpret_cast<cudaStream_t>(new char);
    played::streams.insert(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete reinterpret_cast<char*>(stream);
    return played::give("cudaStreamDestroy", played::streams.erase(stream) == 1);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const bool captured = played::captured.count(stream) != 0;
    *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return played::give("cudaStreamIsCapturing");
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (played::give("cudaStreamBeginCapture") != cudaSuccess)
        return cudaErrorUnknown;
    played::captured.insert(stream);
    played::recorded[stream].clear();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    played::captured.erase(stream);
    *graph = nullptr;
    if (played::give("cudaStreamEndCapture") != cudaSuccess)
        return cudaErrorUnknown;
    auto* const made = new std::vector<played::Kernel>(played::recorded[stream]);
    *graph = reinterpret_cast<cudaGraph_t>(made);
    played::graphs.insert(made);
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    auto& kernels = *reinterpret_cast<std::vector<played::Kernel>*>(graph);
    for (size_t i = 0; i < *count && i < kernels.size(); ++i)
        nodes[i] = reinterpret_cast<cudaGraphNode_t>(&kernels[i]);
    *count = kernels.size();
    return played::give("cudaGraphGetNodes");
}
cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, cudaKernelNodeParams* params) {
    const auto& kernel = *reinterpret_cast<played::Kernel*>(node);
    params->gridDim = kernel.grid;
    params->blockDim = kernel.block;
    params->sharedMemBytes = 0;
    return played::give("cudaGraphKernelNodeGetParams");
}
// A graph that runs shares its nodes with the one that it was made from.
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
    if (played::give("cudaGraphInstantiate") != cudaSuccess)
        return cudaErrorUnknown;
    auto* const made = new cudaGraph_t(graph);
    *runnable = reinterpret_cast<cudaGraphExec_t>(made);
    played::graphs.insert(made);
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    return played::give("cudaGraphUpload");
}
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
    if (played::give("cudaGraphExecKernelNodeSetParams") != cudaSuccess)
        return cudaErrorUnknown;
    auto& kernel = *reinterpret_cast<played::Kernel*>(node);
    const unsigned cluster = kernel.cluster;
    kernel = played::kernel_of(params->func, params->kernelParams);
    kernel.grid = params->gridDim;
    kernel.block = params->blockDim;
    kernel.cluster = cluster;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t) {
    if (played::give("cudaGraphLaunch") != cudaSuccess)
        return cudaErrorUnknown;
    const cudaGraph_t graph = *reinterpret_cast<cudaGraph_t*>(runnable);
    for (played::Kernel kernel : *reinterpret_cast<std::vector<played::Kernel>*>(graph)) {
        kernel.in_graph = true;
        played::ran(kernel);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable) {
    auto* const made = reinterpret_cast<cudaGraph_t*>(runnable);
    const bool alive = played::graphs.erase(made) == 1;
    delete made;
    return played::give("cudaGraphExecDestroy", alive);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    auto* const made = reinterpret_cast<std::vector<played::Kernel>*>(graph);
    const bool alive = played::graphs.erase(made) == 1;
    delete made;
    return played::give("cudaGraphDestroy", alive);
}

}  // extern "C"
