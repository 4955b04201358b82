// SPDX-License-Identifier: Apache-2.0
// Exact choice of the k best of many keys within one thread block; equal keys: lower index first.
//
// A radix descent finds the threshold. Its first digit spans the range that the keys really have:
// scores share exponents, and fixed digits would send most of them to a few counters. Sets are
// kept as words of 32 bits, one bit a key, so that index order comes for free. Counters are only
// added to, so the result does not depend on the order in which threads arrive.
#pragma once

#include "device.cuh"

namespace spin {

constexpr int kBins = 2048;
constexpr int kDigitBits = 11;
constexpr uint32_t kAllLanes = 0xffffffffu;

template <int kThreads>
struct ChooseScratch {
    uint32_t bins[kBins];  // first: read as uint4
    uint32_t warp_totals[kThreads / 32];
    uint32_t lowest[kThreads / 32], highest[kThreads / 32];
    uint32_t digit, left, count;
};

// The keys that are still undecided: base .. base + 2^bits - 1. All above are in, all below out.
struct Range {
    uint32_t base;
    int bits;

    __device__ __forceinline__ bool has(uint32_t key) const {
        return bits >= 32 || (key - base) >> bits == 0;
    }
    __device__ __forceinline__ bool is_above(uint32_t key) const {
        return key >= base && !has(key);
    }
    __device__ __forceinline__ int shift() const {
        return bits > kDigitBits ? bits - kDigitBits : 0;
    }
    __device__ __forceinline__ uint32_t digit(uint32_t key) const {
        return (key - base) >> shift();
    }
    // Narrowed to one digit.
    __device__ __forceinline__ Range at(uint32_t d) const {
        return {base + (d << shift()), shift()};
    }
    // Starts with the keys low .. high.
    static __device__ __forceinline__ Range of(uint32_t low, uint32_t high) {
        return {low, 32 - __clz(high - low)};
    }
};

template <int kThreads>
__device__ __forceinline__ void clear_bins(ChooseScratch<kThreads>& s) {
#pragma unroll
    for (int i = 0; i < kBins / 4 / kThreads; ++i) {
        reinterpret_cast<uint4*>(s.bins)[threadIdx.x + i * kThreads] = make_uint4(0, 0, 0, 0);
    }
}

// Smallest and largest key over the threads; lowest > highest for none. Synchronises.
template <int kThreads>
__device__ __forceinline__ void reduce_range(uint32_t& lowest, uint32_t& highest,
                                             ChooseScratch<kThreads>& s) {
    const int t = threadIdx.x;
    lowest = __reduce_min_sync(kAllLanes, lowest);
    highest = __reduce_max_sync(kAllLanes, highest);
    if ((t & 31) == 0) {
        s.lowest[t >> 5] = lowest;
        s.highest[t >> 5] = highest;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
        lowest = min(lowest, s.lowest[w]);
        highest = max(highest, s.highest[w]);
    }
}

// Exclusive prefix sum over the threads. All threads must call it, and it synchronises.
template <int kThreads>
__device__ __forceinline__ uint32_t scan_block(uint32_t value, ChooseScratch<kThreads>& s,
                                               uint32_t* total = nullptr) {
    const int t = threadIdx.x, lane = t & 31;
    uint32_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t lower = __shfl_up_sync(kAllLanes, sum, step);
        sum += lane >= step ? lower : 0;
    }
    __syncthreads();  // an earlier scan's totals have been read
    if (lane == 31) {
        s.warp_totals[t >> 5] = sum;
    }
    __syncthreads();
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
        const uint32_t n = s.warp_totals[w];
        before += w < (t >> 5) ? n : 0;
        all += n;
    }
    if (total != nullptr) {
        *total = all;
    }
    return before + sum - value;
}

// Finds the bin that holds the k-th largest: s.digit, how many of it are wanted (s.left), how many
// it has (s.count). `load(i)` returns the counts of bins 4i .. 4i + 3. Ends synchronised.
template <int kThreads, typename Load>
__device__ __forceinline__ void find_bin(uint32_t k, ChooseScratch<kThreads>& s, Load load) {
    constexpr int kQuads = kBins / 4 / kThreads;
    const int last = (kThreads - static_cast<int>(threadIdx.x)) * kQuads - 1;  // high digits first
    uint4 counts[kQuads];
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
        counts[i] = load(last - i);
        sum += counts[i].x + counts[i].y + counts[i].z + counts[i].w;
    }
    uint32_t before = scan_block(sum, s);
    if (before < k && k <= before + sum) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const uint32_t four[4] = {counts[i].w, counts[i].z, counts[i].y, counts[i].x};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (before < k && k <= before + four[n]) {
                    s.digit = static_cast<uint32_t>((last - i) * 4 + 3 - n);
                    s.left = k - before;
                    s.count = four[n];
                }
                before += four[n];
            }
        }
    }
    __syncthreads();
}

// The lowest `n` set bits of a word.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t word, int n) {
    if (n >= __popc(word)) {
        return word;
    }
    uint32_t rest = word;
    for (int i = 0; i < n; ++i) {
        rest &= rest - 1;
    }
    return word ^ rest;
}

// chosen = the k best of the candidates. `keys` has 32 * words entries, `total` candidates are set;
// words <= kThreads. Arguments are uniform; all threads must call it; ends synchronised.
template <int kThreads>
__device__ __forceinline__ void choose_best(const uint32_t* keys, const uint32_t* candidates,
                                            int words, int total, int k, uint32_t* chosen,
                                            uint32_t* ties, ChooseScratch<kThreads>& s) {
    constexpr int kWarps = kThreads / 32;
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    if (k <= 0 || k >= total) {
        if (t < words) {
            chosen[t] = k <= 0 ? 0u : candidates[t];
        }
        __syncthreads();
        return;
    }
    uint32_t low = 0xffffffffu, high = 0;
    for (int w = warp; w < words; w += kWarps) {
        if (candidates[w] >> lane & 1u) {
            low = min(low, keys[w * 32 + lane]);
            high = max(high, keys[w * 32 + lane]);
        }
    }
    clear_bins(s);
    reduce_range(low, high, s);
    Range range = Range::of(low, high);
    uint32_t left = static_cast<uint32_t>(k);
    while (true) {
        for (int w = warp; w < words; w += kWarps) {
            const uint32_t key = keys[w * 32 + lane];
            if ((candidates[w] >> lane & 1u) && range.has(key)) {
                atomicAdd(&s.bins[range.digit(key)], 1u);
            }
        }
        __syncthreads();
        find_bin(left, s, [&](int i) { return reinterpret_cast<const uint4*>(s.bins)[i]; });
        range = range.at(s.digit);
        left = s.left;
        // A bin that is wanted as a whole needs no further digit.
        if (range.bits == 0 || s.count == left) {
            break;
        }
        clear_bins(s);
        __syncthreads();
    }
    for (int w = warp; w < words; w += kWarps) {
        const bool in = candidates[w] >> lane & 1u;
        const uint32_t key = keys[w * 32 + lane];
        const uint32_t above = __ballot_sync(kAllLanes, in && range.is_above(key));
        const uint32_t level = __ballot_sync(kAllLanes, in && range.has(key));
        if (lane == 0) {
            chosen[w] = above;
            ties[w] = level;
        }
    }
    __syncthreads();
    const uint32_t level = t < words ? ties[t] : 0u;
    const int before = static_cast<int>(scan_block(__popc(level), s));
    if (t < words) {
        chosen[t] |= lowest_bits(level, max(static_cast<int>(left) - before, 0));
    }
    __syncthreads();
}

}  // namespace spin
