# SPDX-License-Identifier: Apache-2.0
"""For `--custom_module_dirs`, where no start-up file can be installed.

TensorRT-LLM imports this directory by its name, in the process that was started; the folder above
it goes on `sys.path`, and therefore holds nothing else. Ranks import only modules that provide a
model, and only when they build that model: so this one provides the host's own DeepSeek classes
again, as subclasses that add nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
import types

from spin_trtllm.hosts.trtllm.stub import load_stub

# architecture: module below tensorrt_llm._torch.models, class
_MODELS = {
    "DeepseekV4ForCausalLM": ("modeling_deepseekv4", "DeepseekV4ForCausalLM"),
    "DeepseekV32ForCausalLM": ("modeling_deepseekv3", "DeepseekV3ForCausalLM"),
}


def provide(architecture: str) -> None:
    """Register a subclass of the host's own model under the same architecture."""
    module_name, class_name = _MODELS[architecture]
    # By module, not through the host's lookup: in a rank that lookup is what is importing us.
    models = "tensorrt_llm._torch.models"
    own = getattr(importlib.import_module(f"{models}.{module_name}"), class_name)
    ours = types.new_class(class_name, (own,), exec_body=lambda ns: ns.update(__module__=__name__))
    globals()[class_name] = ours  # where pickle looks for it
    utilities = importlib.import_module(f"{models}.modeling_utils")
    utilities.register_auto_model(architecture)(ours)


def _provide_all() -> None:
    for architecture in _MODELS:
        try:
            provide(architecture)
        except Exception as error:  # a release without this model, or with another registry
            logging.getLogger("spin_trtllm").warning(
                "SPIN does not reach ranks that serve %s: %s: %s",
                architecture,
                type(error).__name__,
                error,
            )


if os.environ.get("TLLM_SPIN"):
    load_stub().arm()
    _provide_all()
