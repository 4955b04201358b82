# SPDX-License-Identifier: Apache-2.0
"""Settings shared by all tests."""

from __future__ import annotations

import torch

# The tensors here are small: threads would only make the suite depend on what else runs.
torch.set_num_threads(1)
