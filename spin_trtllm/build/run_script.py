# SPDX-License-Identifier: Apache-2.0
"""The text of `run.sh`: the command that serves an engine."""

from __future__ import annotations

import shlex

from spin_trtllm.build.checkpoint import Checkpoint

# The script finds its own directory, so that an engine can be moved; readlink follows a link to
# it. `exec` leaves no shell between a supervisor's signals and the server.
_TEMPLATE = """\
#!/bin/sh
# Serve this engine; further arguments go to trtllm-serve:  run.sh --tp_size 8 --port 8000
# SPIN_CHECKPOINT=DIR serves the same checkpoint from another place.
set -eu

engine=$(dirname -- "$(readlink -f -- "$0")")
checkpoint={checkpoint}

# Where SPIN's hooks look for their configuration. The log has one line a rank on whether they are
# in place; `spin-trtllm serve` checks the machine first and refuses where they would not be.
export TLLM_SPIN="$engine/spin.yaml"

if ! command -v trtllm-serve >/dev/null; then
    echo "run.sh: no trtllm-serve on PATH: install TensorRT-LLM; spin-trtllm doctor says more" >&2
    exit 2
fi
exec trtllm-serve "${{SPIN_CHECKPOINT:-$checkpoint}}" --config "$engine/llm_args.yaml" "$@"
"""


def run_script_text(checkpoint: Checkpoint) -> str:
    """The shell script, safe for a checkpoint path with any characters."""
    return _TEMPLATE.format(checkpoint=shlex.quote(str(checkpoint.path)))


def checkpoint_of(script: str) -> str | None:
    """The checkpoint's path in a script's text; None if somebody took its line out."""
    lines = script[script.find("\ncheckpoint=") + 1 :].split("\n")
    if not lines[0].startswith("checkpoint="):
        return None
    for end in range(1, len(lines) + 1):  # a name may have line breaks: up to its last quote
        try:
            words = shlex.split("\n".join(lines[:end]))
        except ValueError:
            continue
        return words[0].removeprefix("checkpoint=") if len(words) == 1 else None
    return None
