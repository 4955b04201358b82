// SPDX-License-Identifier: Apache-2.0
// A node's launches as one CUDA graph, which costs the host less than half of their time.
#pragma once

#include "../kernels/launches.h"
#include "node.h"

namespace spin::trt {

// How many thread blocks each launch groups: all that a graph cannot change once it is made.
struct Clusters {
    static constexpr int kMost = 8;  // launches: a node has at most six, unless rows need several
    unsigned of[kMost] = {};
    int count = 0;
};

// One graph with a kernel node for each launch.
class Graph {
public:
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() { clear(); }

    bool is_made() const { return runnable_ != nullptr; }
    const Clusters& clusters() const { return clusters_; }
    // Of what `node` launches. False if that was refused; CUDA's own errors leave it unmade.
    bool make(const Node& node, const Call& call);
    // Renews all parameters with those of `call`, and launches. `done`: whether CUDA took it.
    // False if the call was refused.
    bool launch(const Node& node, const Call& call, bool& done);

private:
    class Building;
    class Renewal;

    void clear();

    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t runnable_ = nullptr;
    cudaGraphNode_t nodes_[Clusters::kMost] = {};
    Clusters clusters_;
};

// The graphs of a node in one execution context.
class Graphs {
public:
    // Finds or makes the graph for a call's shapes; of its addresses only the alignment counts.
    // The one place that allocates. False if the call was refused.
    bool prepare(const Node& node, const Call& call);
    // Launches a call's graph. Without one, and where the stream is being captured, the launches
    // themselves, whose starts and ends overlap. False if it was refused.
    bool run(const Node& node, const Call& call);

private:
    static constexpr int kMost = 8;  // topk_slots has four sizes of clusters
    Graph graphs_[kMost];
    Graph* chosen_ = nullptr;
};

}  // namespace spin::trt
