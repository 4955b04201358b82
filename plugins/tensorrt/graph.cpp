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

// While it lives, this thread may allocate and free although a stream is being captured.
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

bool operator==(const Clusters& a, const Clusters& b) {
    return std::equal(a.of, a.of + a.count, b.of, b.of + b.count);
}

cudaKernelNodeParams node_params(const cudaLaunchConfig_t& config, const void* kernel,
                                 void** arguments) {
    cudaKernelNodeParams params = {};
    params.func = const_cast<void*>(kernel);
    params.gridDim = config.gridDim;
    params.blockDim = config.blockDim;
    params.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
    params.kernelParams = arguments;
    return params;
}

// Launches nothing, and writes down what cannot be renewed later.
class Recording final : public Launcher {
public:
    cudaError_t launch(const cudaLaunchConfig_t& config, const void*, void**) override {
        if (clusters.count == Clusters::kMost) {
            overflowed = true;
        } else {
            clusters.of[clusters.count++] = cluster_of(config);
        }
        return cudaSuccess;
    }

    Clusters clusters;
    bool overflowed = false;
};

// Of a call whose failure is no failure of the node: it shall not be found by whoever asks next.
bool succeeds(cudaError_t error) {
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return error == cudaSuccess;
}

bool is_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return !succeeds(cudaStreamIsCapturing(stream, &status)) ||
           status != cudaStreamCaptureStatusNone;
}

bool has_device() {
    int id = 0;
    return succeeds(cudaGetDevice(&id));
}

}  // namespace

// Adds a kernel node for each launch, which waits for the one before. Unlike on a stream its start
// does not overlap that one's end: in these graphs that gained some percent at one sequence, and
// cost a tenth at 64 rows, where blocks that wait take the place of others that work.
class Graph::Building final : public Launcher {
public:
    explicit Building(Graph& graph) : graph_(graph) {}

    cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                       void** arguments) override {
        const int i = graph_.clusters_.count;
        const cudaKernelNodeParams params = node_params(config, kernel, arguments);
        cudaGraphNode_t* const nodes = graph_.nodes_;
        cudaKernelNodeAttrValue cluster = {};
        cluster.clusterDim = {cluster_of(config), 1, 1};
        built_ = built_ && i < Clusters::kMost &&
                 succeeds(cudaGraphAddKernelNode(&nodes[i], graph_.graph_,
                                                 i > 0 ? &nodes[i - 1] : nullptr, i > 0 ? 1 : 0,
                                                 &params)) &&
                 (cluster.clusterDim.x == 1 ||
                  succeeds(cudaGraphKernelNodeSetAttribute(
                      nodes[i], cudaLaunchAttributeClusterDimension, &cluster)));
        if (built_) {
            graph_.clusters_.of[graph_.clusters_.count++] = cluster.clusterDim.x;
        }
        return cudaSuccess;
    }
    bool is_whole() const { return built_; }

private:
    Graph& graph_;
    bool built_ = true;
};

// Sets a node's parameters for each launch.
class Graph::Renewal final : public Launcher {
public:
    explicit Renewal(const Graph& graph) : graph_(graph) {}

    cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                       void** arguments) override {
        const int i = next_++;
        const cudaKernelNodeParams params = node_params(config, kernel, arguments);
        renewed_ =
            renewed_ && i < graph_.clusters_.count &&
            cluster_of(config) == graph_.clusters_.of[i] &&
            succeeds(cudaGraphExecKernelNodeSetParams(graph_.runnable_, graph_.nodes_[i], &params));
        return cudaSuccess;
    }
    bool is_whole() const { return renewed_ && next_ == graph_.clusters_.count; }

private:
    const Graph& graph_;
    int next_ = 0;
    bool renewed_ = true;
};

void Graph::clear() {
    const Relaxed relaxed;
    if (runnable_ != nullptr) {
        (void)succeeds(cudaGraphExecDestroy(runnable_));
    }
    if (graph_ != nullptr) {
        (void)succeeds(cudaGraphDestroy(graph_));
    }
    runnable_ = nullptr;
    graph_ = nullptr;
    clusters_ = {};
}

bool Graph::make(const Node& node, const Call& call) {
    const Relaxed relaxed;
    cudaStream_t stream = nullptr;
    Building building(*this);
    bool taken = true, made = succeeds(cudaGraphCreate(&graph_, 0));
    if (made) {
        const Redirect redirect(building);
        taken = node.run(call);
    }
    // Uploaded now, so that the first launch need not allocate.
    made = made && taken && building.is_whole() &&
           succeeds(cudaGraphInstantiate(&runnable_, graph_, 0)) &&
           succeeds(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) &&
           succeeds(cudaGraphUpload(runnable_, stream));
    if (stream != nullptr) {
        (void)succeeds(cudaStreamDestroy(stream));
    }
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
    done = renewal.is_whole() && succeeds(cudaGraphLaunch(runnable_, call.stream));
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
    if (recording.clusters.count == 0 || recording.overflowed) {
        return true;
    }
    Graph* const found = std::find_if(std::begin(graphs_), std::end(graphs_), [&](const Graph& g) {
        return !g.is_made() || g.clusters() == recording.clusters;
    });
    if (found == std::end(graphs_)) {
        return true;
    }
    if (!found->is_made() && !found->make(node, call)) {
        return false;
    }
    chosen_ = found->is_made() ? found : nullptr;
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
    }
    return node.run(call);
}

}  // namespace spin::trt
