/* SPDX-License-Identifier: Apache-2.0 */
/* The SPIN kernel library, libspin.so: a plain C interface, one header per operation. */
#ifndef SPIN_SPIN_H_
#define SPIN_SPIN_H_

#include "spin/adopt_scores.h"
#include "spin/advance.h"
#include "spin/common.h"
#include "spin/observe_scores.h"
#include "spin/predict_blocks.h"
#include "spin/quantize_query.h"
#include "spin/select_blocks.h"
#include "spin/topk_slots.h"

#if defined(__has_include)
#if __has_include("spin/score_slots.h")
#include "spin/score_slots.h"
#endif
#endif

#endif /* SPIN_SPIN_H_ */
