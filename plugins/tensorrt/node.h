// SPDX-License-Identifier: Apache-2.0
// What makes up a node beside its tensors: the launches. One file a node defines its constant.
#pragma once

#include <cuda_runtime_api.h>

#include "fields.h"
#include "ports.h"

namespace spin::trt {

// Everything a node may look at when it launches.
struct Call {
    const char* node;
    const Config& config;
    const Layout& layout;
    const void* const* inputs;
    void* const* outputs;
    void* workspace;
    cudaStream_t stream;

    template <typename T>
    const T* input(int i) const {
        return static_cast<const T*>(inputs[i]);
    }
    template <typename T>
    T* output(int i) const {
        return static_cast<T*>(outputs[i]);
    }
};

// Hands out pieces of the workspace, each on a 256-byte line. Over null it only counts.
class Arena {
public:
    explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

    template <typename T>
    T* take(int64_t elements) {
        char* const piece = base_ != nullptr ? base_ + used_ : nullptr;
        used_ += (static_cast<size_t>(elements) * sizeof(T) + 255) / 256 * 256;
        return reinterpret_cast<T*>(piece);
    }
    size_t used() const { return used_; }

private:
    char* base_;
    size_t used_ = 0;
};

struct Node {
    const char* name;
    NodeBit bit;
    Ports ports;
    // Whether fields go together; false, with a line in the log that starts with `name`.
    bool (*agree)(const char* name, const Config&);
    size_t (*workspace_bytes)(const Config&, const Layout&);
    // Launches; false, with a line in the log, when one was refused.
    bool (*run)(const Call&);
};

extern const Node kIndexerNode;
extern const Node kPredictBlocksNode;
extern const Node kSparseIndexerNode;
extern const Node kObserveNode;

// Whether a stem took its arguments; if not, its complaint goes to the log.
bool launched(const Call& call, const char* stem, int status) noexcept;

inline bool always_agree(const char*, const Config&) {
    return true;
}

inline size_t no_workspace(const Config&, const Layout&) {
    return 0;
}

template <int kInputs, int kOutputs>
constexpr Ports ports_of(const Port (&inputs)[kInputs], const Port (&outputs)[kOutputs]) {
    static_assert(kInputs <= kMaxPorts && kOutputs <= kMaxPorts);
    return {inputs, outputs, kInputs, kOutputs};
}

}  // namespace spin::trt
