// SPDX-License-Identifier: Apache-2.0
// The two names that TensorRT looks up. Without setLoggerFinder it takes the library for an older
// kind and finds no creators.
#include "log.h"
#include "plugin.h"
#include "spin/common.h"

#define SPIN_TEXT_OF(macro) #macro
#define SPIN_TEXT(macro) SPIN_TEXT_OF(macro)

// Python looks for this in the file (spin_trtllm/hosts/tensorrt/plugin.py), before it loads it.
__attribute__((used)) static const char version_mark[] =
    "libspin_trt_plugin version " SPIN_TEXT(SPIN_VERSION);

#define SPIN_TRT_EXPORT extern "C" __attribute__((visibility("default")))

SPIN_TRT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    spin::trt::set_logger_finder(finder);
}

SPIN_TRT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    using namespace spin::trt;
    static Creator indexer(kIndexerNode), predict_blocks(kPredictBlocksNode),
        sparse_indexer(kSparseIndexerNode), observe(kObserveNode);
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&indexer, &predict_blocks,
                                                                  &sparse_indexer, &observe};
    count = 4;
    return creators;
}
