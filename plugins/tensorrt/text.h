// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdio>

namespace spin::trt {

// Text of limited length for a log line, built piece by piece; what does not fit is left out.
struct Text {
    char held[256] = "";
    size_t length = 0;

    template <typename... Values>
    void add(const char* format, Values... values) {
        const int more = std::snprintf(held + length, sizeof(held) - length, format, values...);
        if (more > 0) {
            length += static_cast<size_t>(more);
            length = length < sizeof(held) ? length : sizeof(held) - 1;
        }
    }
};

}  // namespace spin::trt
