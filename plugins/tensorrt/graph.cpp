// SPDX-License-Identifier: Apache-2.0
#include "graph.h"

#include <algorithm>
#include <iterator>

namespace spin::trt {
namespace {

// While it lives, what this thread launches goes to a launcher.
class Redirect {
public:
    explicit Redirect(Launcher& to) : before_(exchange_launcher(&to)) {}
    ~Redirect() { exchange_launcher(before_); }
    Redirect(const Redirect&) = delete;
    Redirect& operator=(const Redirect&) = delete;

private:
    Launcher* const before_;
};

// While it lives, this thread may allocate although a stream is being captured.
class Relaxed {
public:
    Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

unsigned cluster_of(const cudaLaunchConfig_t& config) {
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
            return config.attrs[i].val.clusterDim.x;
        }
    }
    return 1;
}

// Launches nothing, and writes down what was launched.
class Recording final : public Launcher {
public:
    cudaError_t launch(const cudaLaunchConfig_t& config, const void*, void**) override {
        if (launches.count == Launches::kMost) {
            overflowed = true;
        } else {
            launches.of[launches.count++] = {config.gridDim, config.blockDim,
                                             config.dynamicSmemBytes, cluster_of(config)};
        }
        return cudaSuccess;
    }

    Launches launches;
    bool overflowed = false;
};

bool same(const dim3& a, const dim3& b) {
    return a.x == b.x && a.y == b.y && a.z == b.z;
}

// Whether the node is this launch: CUDA lists nodes as they were made, but does not promise it.
bool is_launch(cudaGraphNode_t node, const Launches::Launch& launch) {
    cudaKernelNodeParams params = {};
    return cudaGraphKernelNodeGetParams(node, &params) == cudaSuccess &&
           same(params.gridDim, launch.grid) && same(params.blockDim, launch.block) &&
           params.sharedMemBytes == launch.shared_bytes;
}

bool is_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return error != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

bool has_device() {
    int id = 0;
    const bool found = cudaGetDevice(&id) == cudaSuccess;
    (void)cudaGetLastError();
    return found;
}

}  // namespace

// Sets a node's parameters for each launch.
class Graph::Renewal final : public Launcher {
public:
    explicit Renewal(const Graph& graph) : graph_(graph) {}

    cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                       void** arguments) override {
        const int i = next_++;
        cudaKernelNodeParams params = {};
        params.func = const_cast<void*>(kernel);
        params.gridDim = config.gridDim;
        params.blockDim = config.blockDim;
        params.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
        params.kernelParams = arguments;
        renewed_ = renewed_ && i < graph_.count_ && cluster_of(config) == graph_.clusters_[i] &&
                   cudaGraphExecKernelNodeSetParams(graph_.runnable_, graph_.nodes_[i], &params) ==
                       cudaSuccess;
        return cudaSuccess;
    }
    bool is_whole() const { return renewed_ && next_ == graph_.count_; }

private:
    const Graph& graph_;
    int next_ = 0;
    bool renewed_ = true;
};

void Graph::clear() {
    if (runnable_ != nullptr) {
        cudaGraphExecDestroy(runnable_);
    }
    if (graph_ != nullptr) {
        cudaGraphDestroy(graph_);
    }
    runnable_ = nullptr;
    graph_ = nullptr;
    count_ = 0;
}

bool Graph::fits(const Launches& launches) const {
    if (count_ != launches.count) {
        return false;
    }
    for (int i = 0; i < count_; ++i) {
        if (clusters_[i] != launches.of[i].cluster) {
            return false;
        }
    }
    return true;
}

bool Graph::make(const Node& node, const Call& call, const Launches& launches) {
    const Relaxed relaxed;
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
        return true;
    }
    bool taken = true, made = false;
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess) {
        Call captured = call;
        captured.stream = stream;
        taken = node.run(captured);
        const size_t wanted = static_cast<size_t>(launches.count);
        size_t count = Launches::kMost;
        made = cudaStreamEndCapture(stream, &graph_) == cudaSuccess &&
               cudaGraphGetNodes(graph_, nodes_, &count) == cudaSuccess && count == wanted &&
               cudaGraphInstantiate(&runnable_, graph_, 0) == cudaSuccess &&
               cudaGraphUpload(runnable_, stream) == cudaSuccess;
        for (size_t i = 0; made && i < wanted; ++i) {
            clusters_[i] = launches.of[i].cluster;
            made = is_launch(nodes_[i], launches.of[i]);
        }
    }
    cudaStreamDestroy(stream);
    count_ = launches.count;
    if (!made) {
        clear();
    }
    return taken;
}

bool Graph::launch(const Node& node, const Call& call, bool& done) {
    Renewal renewal(*this);
    const Redirect redirect(renewal);
    if (!node.run(call)) {
        return false;
    }
    done = renewal.is_whole() && cudaGraphLaunch(runnable_, call.stream) == cudaSuccess;
    return true;
}

bool Graphs::prepare(const Node& node, const Call& call) {
    chosen_ = nullptr;
    if (!has_device()) {
        return true;
    }
    Recording recording;
    {
        const Redirect redirect(recording);
        if (!node.run(call)) {
            return false;
        }
    }
    if (recording.launches.count == 0 || recording.overflowed) {
        return true;
    }
    Graph* const found = std::find_if(std::begin(graphs_), std::end(graphs_), [&](const Graph& g) {
        return !g.is_made() || g.fits(recording.launches);
    });
    if (found == std::end(graphs_)) {
        return true;
    }
    if (!found->is_made() && !found->make(node, call, recording.launches)) {
        return false;
    }
    chosen_ = found->is_made() ? found : nullptr;
    (void)cudaGetLastError();
    return true;
}

bool Graphs::run(const Node& node, const Call& call) {
    if (chosen_ != nullptr && !is_captured(call.stream)) {
        bool done = false;
        if (!chosen_->launch(node, call, done)) {
            return false;
        }
        if (done) {
            return true;
        }
        chosen_ = nullptr;  // a second attempt would fail likewise
        (void)cudaGetLastError();
    }
    return node.run(call);
}

}  // namespace spin::trt
