// SPDX-License-Identifier: Apache-2.0
// spin_version and spin_error_string.
#include <cstdio>

#include "status.h"

namespace spin {
namespace {

thread_local int last_status = SPIN_OK;
thread_local char last_text[256] = "";

}  // namespace

int fail(int status, const char* field, const char* allowed) {
    last_status = status;
    std::snprintf(last_text, sizeof(last_text), "%s: %s%s", field,
                  status == SPIN_ERROR_CUDA ? "" : "allowed: ", allowed);
    return status;
}

}  // namespace spin

extern "C" int spin_version(void) {
    return SPIN_VERSION;
}

extern "C" const char* spin_error_string(int status) {
    if (status != SPIN_OK && status == spin::last_status)
        return spin::last_text;
    switch (status) {
        case SPIN_OK:
            return "ok";
        case SPIN_ERROR_NULL:
            return "a required pointer is null";
        case SPIN_ERROR_RANGE:
            return "a number is outside its range";
        case SPIN_ERROR_ALIGNMENT:
            return "a pointer or stride is not aligned";
        case SPIN_ERROR_UNSUPPORTED:
            return "a value that this library does not support";
        case SPIN_ERROR_CUDA:
            return "the CUDA runtime refused the launch";
        default:
            return "unknown status";
    }
}
