// SPDX-License-Identifier: Apache-2.0
// A node's launches as one CUDA graph, which costs the host a third of their time or less.
#pragma once

#include "../kernels/launches.h"
#include "node.h"

namespace spin::trt {

// What a node launches, but for kernels and their parameters.
struct Launches {
    static constexpr int kMost = 8;  // a node has at most six, unless its rows need several
    int count = 0;
    struct Launch {
        dim3 grid, block;
        size_t shared_bytes;
        unsigned cluster;
    } of[kMost];
};

// One graph with a kernel node for each launch.
class Graph {
public:
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() { clear(); }

    bool is_made() const { return count_ > 0; }
    // Whether it can become these launches: a node's cluster is all that cannot be changed.
    bool fits(const Launches& launches) const;
    // Captures what `run` launches. False if that was refused; CUDA's own errors leave it unmade.
    bool make(const Node& node, const Call& call, const Launches& launches);
    // Renews all parameters with those of `call`, and launches. `done`: whether CUDA took it.
    // False if the call was refused.
    bool launch(const Node& node, const Call& call, bool& done);

private:
    class Renewal;

    void clear();

    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t runnable_ = nullptr;
    cudaGraphNode_t nodes_[Launches::kMost] = {};
    unsigned clusters_[Launches::kMost] = {};
    int count_ = 0;
};

// The graphs of a node in one execution context.
class Graphs {
public:
    // Finds or makes the graph for a call's shapes; of its addresses only the alignment counts.
    // The one place that allocates. False if the call was refused.
    bool prepare(const Node& node, const Call& call);
    // Launches a call's graph. Without one, and where the stream is being captured, the launches
    // themselves, which overlap in the captured graph as in the stream. False if it was refused.
    bool run(const Node& node, const Call& call);

private:
    static constexpr int kMost = 8;  // clusters of topk_slots: 1, 2, 4, 8
    Graph graphs_[kMost];
    Graph* chosen_ = nullptr;
};

}  // namespace spin::trt
