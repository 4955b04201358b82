# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build --use_spin`: from a checkpoint to a deployment directory, one module a stage."""
