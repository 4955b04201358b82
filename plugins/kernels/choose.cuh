// SPDX-License-Identifier: Apache-2.0
// Exact choice of the k best of many keys within one thread block; equal keys: lower index first.
//
// A radix descent finds the threshold. Its first digit spans the range that the keys really have:
// scores share exponents, and fixed digits would send most of them to a few counters. Sets are
// kept as words of 32 bits, one bit a key, so that index order comes for free. Counters are only
// added to, so the result does not depend on the order in which threads arrive.
#pragma once

#include <type_traits>

#include "device.cuh"

namespace spin {

constexpr int kBins = 1024;
constexpr int kDigitBits = 10;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kFew = 32;  // undecided keys that are compared one by one

template <int kThreads>
struct ChooseScratch {
    uint32_t bins[kBins];  // first: read as vectors
    uint32_t warp_totals[kThreads / 32], bin_totals[kThreads / 32];
    uint32_t lowest[kThreads / 32], highest[kThreads / 32];
    uint32_t digit, left, count;
    uint32_t few, few_keys[kFew], few_places[kFew];
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

// Counts of kBins / kThreads neighbouring bins, in one access.
template <int kThreads>
struct Bins {
    static constexpr int kEach = kBins / kThreads;
    static_assert(kEach % 2 == 0, "pairs of bins");
    alignas(16) uint32_t counts[kEach];

    __device__ __forceinline__ void load(const uint32_t* bins, int place) {
        using Access = std::conditional_t<kEach % 4 == 0, uint4, uint2>;
        constexpr int kAccesses = kEach * sizeof(uint32_t) / sizeof(Access);
#pragma unroll
        for (int n = 0; n < kAccesses; ++n) {
            reinterpret_cast<Access*>(counts)[n] =
                reinterpret_cast<const Access*>(bins)[place * kAccesses + n];
        }
    }
    __device__ __forceinline__ void add(const Bins& other) {
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            counts[n] += other.counts[n];
        }
    }
    __device__ __forceinline__ uint32_t sum() const {
        uint32_t all = 0;
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            all += counts[n];
        }
        return all;
    }
};

template <int kThreads>
__device__ __forceinline__ void clear_bins(ChooseScratch<kThreads>& s) {
    for (int i = threadIdx.x; i < kBins / 4; i += kThreads) {
        reinterpret_cast<uint4*>(s.bins)[i] = make_uint4(0, 0, 0, 0);
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

// Inclusive prefix sum over the lanes.
__device__ __forceinline__ uint32_t scan_warp(uint32_t value) {
    const int lane = threadIdx.x & 31;
    uint32_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t lower = __shfl_up_sync(kAllLanes, sum, step);
        sum += lane >= step ? lower : 0;
    }
    return sum;
}

// Exclusive prefix sum over the threads. All threads must call it, and it synchronises.
template <int kThreads>
__device__ __forceinline__ uint32_t scan_block(uint32_t value, ChooseScratch<kThreads>& s,
                                               uint32_t* total = nullptr) {
    const int t = threadIdx.x, lane = t & 31;
    const uint32_t sum = scan_warp(value);
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
// it has (s.count). `load(place)` returns the thread's Bins. Ends synchronised. Only the warp that
// holds the bin looks closer.
template <int kThreads, typename Load>
__device__ __forceinline__ void find_bin(uint32_t k, ChooseScratch<kThreads>& s, Load load) {
    constexpr int kEach = kBins / kThreads, kWarps = kThreads / 32;
    const int t = threadIdx.x, warp = t >> 5;
    const int place = kThreads - 1 - t;  // high digits first
    const Bins<kThreads> bins = load(place);
    const uint32_t sum = bins.sum();
    const uint32_t of_warp = __reduce_add_sync(kAllLanes, sum);
    if ((t & 31) == 0) {
        s.bin_totals[warp] = of_warp;
    }
    __syncthreads();
    uint32_t before = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        before += w < warp ? s.bin_totals[w] : 0;
    }
    if (before < k && k <= before + of_warp) {
        before += scan_warp(sum) - sum;
#pragma unroll
        for (int n = kEach - 1; n >= 0; --n) {
            const uint32_t here = bins.counts[n];
            if (before < k && k <= before + here) {
                s.digit = static_cast<uint32_t>(place * kEach + n);
                s.left = k - before;
                s.count = here;
            }
            before += here;
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

// Calls f(word, key, is_candidate) for the lane's key in each of the warp's words. Loads of four
// words go out together: everything here is a chain of short waits.
template <int kThreads, typename Visit>
__device__ __forceinline__ void for_each_key(const uint32_t* keys, const uint32_t* candidates,
                                             int words, Visit f) {
    constexpr int kWarps = kThreads / 32, kTogether = 4;
    const int lane = threadIdx.x & 31;
    for (int first = threadIdx.x >> 5; first < words; first += kTogether * kWarps) {
        uint32_t key[kTogether];
        bool in[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int w = min(first + i * kWarps, words - 1);
            key[i] = keys[w * 32 + lane];
            in[i] = candidates[w] >> lane & 1u;
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (first + i * kWarps < words) {
                f(first + i * kWarps, key[i], in[i]);
            }
        }
    }
}

// chosen = the k best of the candidates. `keys` has 32 * words entries, `total` candidates are set;
// words <= kThreads. `known` may hold a range that all candidates lie in, at best a narrow one; an
// empty one (bits < 0) has it looked up. Arguments are uniform; all threads must call it; ends
// synchronised.
template <int kThreads>
__device__ __forceinline__ void choose_best(const uint32_t* keys, const uint32_t* candidates,
                                            int words, int total, int k, uint32_t* chosen,
                                            uint32_t* ties, ChooseScratch<kThreads>& s,
                                            Range known = Range{0, -1}) {
    const int t = threadIdx.x, lane = t & 31;
    if (k <= 0 || k >= total) {
        if (t < words) {
            chosen[t] = k <= 0 ? 0u : candidates[t];
        }
        __syncthreads();
        return;
    }
    Range range = known;
    clear_bins(s);
    if (known.bits < 0) {
        uint32_t low = 0xffffffffu, high = 0;
        for_each_key<kThreads>(keys, candidates, words, [&](int, uint32_t key, bool in) {
            low = in ? min(low, key) : low;
            high = in ? max(high, key) : high;
        });
        reduce_range(low, high, s);
        range = Range::of(low, high);
    } else {
        __syncthreads();
    }
    uint32_t left = static_cast<uint32_t>(k), count = static_cast<uint32_t>(total);
    if (t == 0) {
        s.few = 0;
    }
    do {
        for_each_key<kThreads>(keys, candidates, words, [&](int, uint32_t key, bool in) {
            if (in && range.has(key)) {
                atomicAdd(&s.bins[range.digit(key)], 1u);
            }
        });
        __syncthreads();
        find_bin(left, s, [&](int place) {
            Bins<kThreads> bins;
            bins.load(s.bins, place);
            return bins;
        });
        range = range.at(s.digit);
        left = s.left;
        count = s.count;
        if (range.bits == 0 || count == left || count <= kFew) {
            break;
        }
        clear_bins(s);
        __syncthreads();
    } while (true);
    const bool whole = count == left;  // all that is undecided is wanted
    const bool few = !whole && count <= kFew;
    if (few) {
        for_each_key<kThreads>(keys, candidates, words, [&](int w, uint32_t key, bool in) {
            if (in && range.has(key)) {
                const uint32_t at = atomicAdd(&s.few, 1u);
                s.few_keys[at] = key;
                s.few_places[at] = static_cast<uint32_t>(w * 32 + lane);
            }
        });
        __syncthreads();
    }
    for_each_key<kThreads>(keys, candidates, words, [&](int w, uint32_t key, bool is_candidate) {
        const uint32_t place = static_cast<uint32_t>(w * 32 + lane);
        bool in = is_candidate && range.is_above(key);
        const bool level = is_candidate && range.has(key);
        if (level && few) {
            uint32_t better = 0;
#pragma unroll 4
            for (uint32_t i = 0; i < count; ++i) {
                const uint32_t other = s.few_keys[i];
                better += other > key || (other == key && s.few_places[i] < place);
            }
            in = better < left;
        }
        in |= level && whole;
        const uint32_t chosen_word = __ballot_sync(kAllLanes, in);
        const uint32_t level_word = __ballot_sync(kAllLanes, level);
        if (lane == 0) {
            chosen[w] = chosen_word;
            ties[w] = level_word;
        }
    });
    __syncthreads();
    if (whole || few) {
        return;
    }
    const uint32_t level = t < words ? ties[t] : 0u;
    const int before = static_cast<int>(scan_block(__popc(level), s));
    if (t < words) {
        chosen[t] |= lowest_bits(level, max(static_cast<int>(left) - before, 0));
    }
    __syncthreads();
}

}  // namespace spin
