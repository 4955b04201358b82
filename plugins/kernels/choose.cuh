// SPDX-License-Identifier: Apache-2.0
// Exact choice of the k best of many keys within one thread block; equal keys: lower index first.
//
// A radix descent finds the threshold, three digits at most; sets are kept as words of 32 bits, one
// bit a key, so that index order comes for free. Counters are only added to, so the result does not
// depend on the order in which threads arrive.
#pragma once

#include "device.cuh"

namespace spin {

constexpr int kChooseThreads = 512;
constexpr int kChooseWarps = kChooseThreads / 32;
constexpr int kBins = 2048;
constexpr int kDigits = 3;  // of 11, 11 and 10 bits

struct ChooseScratch {
    uint32_t bins[kBins];  // first: read as uint4
    uint32_t warp_totals[kChooseWarps];
    uint32_t digit, left, count;
};

__device__ __forceinline__ int digit_shift(int pass) {
    return pass == 0 ? 21 : pass == 1 ? 10 : 0;
}
__device__ __forceinline__ uint32_t digit_mask(int pass) {
    return pass == 2 ? 1023u : 2047u;
}

__device__ __forceinline__ void clear_bins(ChooseScratch& s) {
    reinterpret_cast<uint4*>(s.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// Exclusive prefix sum over the threads. All threads must call it, and it synchronises.
__device__ __forceinline__ uint32_t scan_block(uint32_t value, ChooseScratch& s,
                                               uint32_t* total = nullptr) {
    const int t = threadIdx.x, lane = t & 31;
    uint32_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t lower = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step)
            sum += lower;
    }
    __syncthreads();  // an earlier scan's totals have been read
    if (lane == 31)
        s.warp_totals[t >> 5] = sum;
    __syncthreads();
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kChooseWarps; ++w) {
        const uint32_t n = s.warp_totals[w];
        if (w < (t >> 5))
            before += n;
        all += n;
    }
    if (total != nullptr)
        *total = all;
    return before + sum - value;
}

// Finds the bin that holds the k-th largest: its digit, how many of it are wanted, how many it has.
// `load(i)` returns the counts of bins 4i .. 4i + 3.
template <typename Load>
__device__ __forceinline__ void find_bin(uint32_t k, ChooseScratch& s, Load load) {
    const int quad = kChooseThreads - 1 - static_cast<int>(threadIdx.x);  // high digits first
    const uint4 c = load(quad);
    const uint32_t counts[4] = {c.w, c.z, c.y, c.x};
    uint32_t before = scan_block(c.x + c.y + c.z + c.w, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (before < k && k <= before + counts[i]) {
            s.digit = static_cast<uint32_t>(quad * 4 + 3 - i);
            s.left = k - before;
            s.count = counts[i];
        }
        before += counts[i];
    }
    __syncthreads();
}

// The lowest `n` set bits of a word.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t word, int n) {
    if (n >= __popc(word))
        return word;
    uint32_t rest = word;
    for (int i = 0; i < n; ++i)
        rest &= rest - 1;
    return word ^ rest;
}

// chosen = the k best of the candidates. `keys` has 32 * words entries, `total` candidates are set;
// words <= kChooseThreads. Arguments are uniform; all threads must call it; ends synchronised.
__device__ inline void choose_best(const uint32_t* keys, const uint32_t* candidates, int words,
                                   int total, int k, uint32_t* chosen, uint32_t* ties,
                                   ChooseScratch& s) {
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    if (k <= 0 || k >= total) {
        if (t < words)
            chosen[t] = k <= 0 ? 0u : candidates[t];
        __syncthreads();
        return;
    }
    uint32_t prefix = 0, mask = 0, left = static_cast<uint32_t>(k);
    for (int pass = 0; pass < kDigits; ++pass) {
        const int shift = digit_shift(pass);
        clear_bins(s);
        __syncthreads();
        for (int w = warp; w < words; w += kChooseWarps) {
            if (!(candidates[w] >> lane & 1u))
                continue;
            const uint32_t key = keys[w * 32 + lane];
            if ((key & mask) == prefix)
                atomicAdd(&s.bins[key >> shift & digit_mask(pass)], 1u);
        }
        __syncthreads();
        find_bin(left, s, [&](int i) { return reinterpret_cast<const uint4*>(s.bins)[i]; });
        prefix |= s.digit << shift;
        mask |= digit_mask(pass) << shift;
        left = s.left;
        const bool whole = s.count == left;  // the bin is wanted as it is: no digit matters below
        __syncthreads();
        if (whole)
            break;
    }
    for (int w = warp; w < words; w += kChooseWarps) {
        const bool in = candidates[w] >> lane & 1u;
        const uint32_t key = in ? keys[w * 32 + lane] & mask : 0u;
        const uint32_t above = __ballot_sync(0xffffffffu, in && key > prefix);
        const uint32_t level = __ballot_sync(0xffffffffu, in && key == prefix);
        if (lane == 0)
            chosen[w] = above, ties[w] = level;
    }
    __syncthreads();
    const uint32_t level = t < words ? ties[t] : 0u;
    const int before = static_cast<int>(scan_block(__popc(level), s));
    if (t < words)
        chosen[t] |= lowest_bits(level, max(static_cast<int>(left) - before, 0));
    __syncthreads();
}

}  // namespace spin
