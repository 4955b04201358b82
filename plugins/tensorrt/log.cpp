// SPDX-License-Identifier: Apache-2.0
#include "log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace spin::trt {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept {
    logger_finder = finder;
}

bool refuse(const char* format, ...) noexcept {
    char line[512];
    va_list values;
    va_start(values, format);
    std::vsnprintf(line, sizeof(line), format, values);
    va_end(values);
    for (char* c = line; *c != '\0'; ++c) {
        *c = ' ' <= *c && *c <= '~' ? *c : '?';  // names come from outside, and a line is one line
    }
    try {  // the finder is the application's, and not bound to keep quiet
        nvinfer1::ILoggerFinder* finder = logger_finder;
        nvinfer1::ILogger* logger = finder != nullptr ? finder->findLogger() : nullptr;
        if (logger != nullptr) {
            logger->log(nvinfer1::ILogger::Severity::kERROR, line);
            return false;
        }
    } catch (...) {
    }
    std::fprintf(stderr, "%s\n", line);
    return false;
}

}  // namespace spin::trt
