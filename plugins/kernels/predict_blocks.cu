// SPDX-License-Identifier: Apache-2.0
// spin_predict_blocks: block scores from the averages alone, for every pooling.
#include "device.cuh"
#include "spin/predict_blocks.h"
#include "status.h"

namespace spin {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float read(const __nv_bfloat16* p) {
    return __bfloat162float(*p);
}
__device__ __forceinline__ float read(const float* p) {
    return *p;
}

// The four largest so far, descending; equal values take separate places.
struct Top4 {
    float best[4];
    __device__ void clear() {
        for (int i = 0; i < 4; ++i)
            best[i] = minus_infinity();
    }
    __device__ void add(float x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float larger = fmaxf(best[i], x);
            x = fminf(best[i], x);
            best[i] = larger;
        }
    }
};

// One thread a block and row. Reads of neighbouring threads are `block_size` apart, so this is no
// rival of spin_advance in speed; it serves the other poolings and the tests.
template <typename State>
__global__ void __launch_bounds__(kThreads) predict(const SpinPredictBlocksParams p) {
    wait_for_inputs();
    const int64_t e = blockIdx.x;
    const int64_t lane = entry_lane(p.lanes, p.lane_stride, p.sequences, e);
    const State* v = static_cast<const State*>(p.v) + lane * p.v_stride;
    const State* d = static_cast<const State*>(p.d) + lane * p.d_stride;
    const int64_t total = static_cast<int64_t>(p.rows) * p.blocks;
    const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; i < total;
         i += step) {
        const int64_t row = i / p.blocks, block = i % p.blocks;
        const int64_t position = p.positions[e % p.sequences * p.rows + row];
        const int64_t query = query_slot(position, p.ratio);
        const int64_t visible = min(visible_slots(position, p.ratio), p.slots);
        const int64_t first = block * p.block_size;
        const int64_t end = min(first + p.block_size, visible);
        float result = minus_infinity();
        if (first < end) {
            Top4 top;
            top.clear();
            float sum = 0.0f;
            for (int64_t slot = first; slot < end; ++slot) {
                const int64_t offset = min(query - slot, p.slots);
                const float predicted = lane < 0 ? 0.0f : fmaxf(read(v + slot), read(d + offset));
                if (p.pooling == SPIN_POOLING_MAX) {
                    result = fmaxf(result, predicted);
                } else if (p.pooling == SPIN_POOLING_MEAN) {
                    sum += predicted;
                } else {
                    top.add(predicted);
                }
            }
            const int64_t count = end - first;
            if (p.pooling == SPIN_POOLING_MEAN)
                result = sum / static_cast<float>(count);
            if (p.pooling == SPIN_POOLING_TOP4) {
                const int terms = static_cast<int>(min(count, int64_t{4}));
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (n < terms)
                        sum += top.best[n];
                result = sum / static_cast<float>(terms);
            }
        }
        p.block_scores[(e * p.rows + row) * p.blocks + block] = result;
    }
}

}  // namespace
}  // namespace spin

extern "C" int spin_predict_blocks(const SpinPredictBlocksParams* p, cudaStream_t stream) {
    using namespace spin;
    SPIN_CHECK_STRUCT(p);
    SPIN_CHECK_RANGE(p, entries, 0, kMaxEntries);
    if (p->entries == 0)
        return SPIN_OK;
    SPIN_CHECK_POINTER(p, v, 2);
    SPIN_CHECK_POINTER(p, d, 2);
    SPIN_CHECK_POINTER(p, lanes, 8);
    SPIN_CHECK_POINTER(p, positions, 8);
    SPIN_CHECK_POINTER(p, block_scores, 4);
    SPIN_CHECK_RANGE(p, rows, 1, kMaxRows);
    SPIN_CHECK_RANGE(p, slots, 1, kMaxSlots);
    SPIN_CHECK_RANGE(p, v_stride, p->slots, kMaxSlots * 2);
    SPIN_CHECK_RANGE(p, d_stride, p->slots + 1, kMaxSlots * 2);
    SPIN_CHECK_RANGE(p, lane_stride, 1, kMaxLanes);
    SPIN_CHECK_RANGE(p, ratio, 1, 1 << 20);
    SPIN_CHECK(is_block_size(p->block_size), SPIN_ERROR_UNSUPPORTED, "block_size",
               "8, 16, 32, 64, 128");
    SPIN_CHECK_RANGE(p, blocks, (p->slots + p->block_size - 1) / p->block_size, kMaxSlots);
    SPIN_CHECK_RANGE(p, sequences, 1, p->entries);
    SPIN_CHECK(p->entries % p->sequences == 0, SPIN_ERROR_RANGE, "sequences",
               "a divisor of entries");
    SPIN_CHECK_RANGE(p, pooling, SPIN_POOLING_MAX, SPIN_POOLING_MEAN);
    SPIN_CHECK(p->state_dtype == SPIN_STATE_BF16 || p->state_dtype == SPIN_STATE_FP32,
               SPIN_ERROR_UNSUPPORTED, "state_dtype", "SPIN_STATE_BF16, SPIN_STATE_FP32");
    const int64_t work = (static_cast<int64_t>(p->rows) * p->blocks + kThreads - 1) / kThreads;
    const dim3 grid(static_cast<unsigned>(p->entries),
                    static_cast<unsigned>(work < 4096 ? work : 4096));
    return p->state_dtype == SPIN_STATE_BF16
               ? launch(predict<__nv_bfloat16>, grid, kThreads, 0, 1, stream, *p)
               : launch(predict<float>, grid, kThreads, 0, 1, stream, *p);
}
