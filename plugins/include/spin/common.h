/* SPDX-License-Identifier: Apache-2.0 */
/* What every stem of the SPIN kernel library shares: version, status codes, state storage. */
#ifndef SPIN_COMMON_H_
#define SPIN_COMMON_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

/* major * 10000 + minor * 100 + patch; changes whenever a parameter struct changes. */
#define SPIN_VERSION 500

#define SPIN_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SPIN_OK = 0,
    SPIN_ERROR_NULL = 1,        /* a required pointer is null */
    SPIN_ERROR_RANGE = 2,       /* a number is outside its range */
    SPIN_ERROR_ALIGNMENT = 3,   /* a pointer or stride is not aligned as required */
    SPIN_ERROR_UNSUPPORTED = 4, /* a legal value that this library cannot run */
    SPIN_ERROR_CUDA = 5         /* the CUDA runtime refused the launch */
};

/* Storage of the averages V and D. */
enum { SPIN_STATE_BF16 = 0, SPIN_STATE_FP32 = 1 };

/* SPIN_VERSION of the library that was loaded. */
SPIN_EXPORT int spin_version(void);

/* Text for a status. Right after a failing call in the same thread it names the field. */
SPIN_EXPORT const char* spin_error_string(int status);

#ifdef __cplusplus
}
#endif

/*
 * Rules of every entry point `int spin_<stem>(const Spin<Stem>Params*, cudaStream_t)`:
 * - arguments are checked on the host, then the launch is enqueued; nothing is allocated,
 *   synchronised or read back, and grids depend on capacities only, so calls can be captured;
 * - no entries or no rows is legal and launches nothing;
 * - pointers are device pointers; strides count elements; offsets are computed in 64 bits;
 * - `struct_bytes` is sizeof the struct, so that a caller built against other headers is refused.
 *
 * An entry is one sequence in one layer. With `sequences` entries a layer, entry e reads the
 * per-sequence inputs (lanes, positions, tenants, sequence_ids, page_table) at e % sequences.
 * A lane that is not one of its layer's, 0 .. lane_stride - 1, is none: -1 by convention. Such an
 * entry has no state, and none is read or written for it.
 */
#endif /* SPIN_COMMON_H_ */
