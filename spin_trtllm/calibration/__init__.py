# SPDX-License-Identifier: Apache-2.0
"""A target sparsity for each layer, from traces: `curves` measures, `allocate` decides, `run` does.

Layers forget at different rates: where good blocks stay good, far more can be skipped at the same
misses. The mean over the layers, and so what a step reads, stays as it was.
"""
