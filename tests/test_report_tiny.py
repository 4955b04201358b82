# SPDX-License-Identifier: Apache-2.0
"""What clearly holds on the trained tiny model stays so: regression test of the paper's orderings.

Only those of Table 1 do. The others are undecided on traces that a test can afford.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from replay_cli import ROOT, Capture, call
from report_cases import report

from spin_trtllm.tiny import checkpoint_path

pytest.importorskip("transformers")

PROMPT_BYTES, STEPS = 1_200, 288  # nine runs of steps: enough for intervals
PRESET = ("--spin-config", str(ROOT / "build_configs" / "tiny-deepseek-v4.yaml"))


@pytest.mark.slow
def test_table_1_holds_on_the_tiny_model(tmp_path: Path, capsys: Capture) -> None:
    prompt, trace = tmp_path / "prompt.txt", str(tmp_path / "licence.safetensors")
    prompt.write_bytes((ROOT / "LICENSE").read_bytes()[:PROMPT_BYTES])
    captured = ("--checkpoint", str(checkpoint_path()), "--prompt", prompt, "--out", trace)
    code, _, _ = call(capsys, "trace", *captured, "--max-new-tokens", str(STEPS), *PRESET)
    assert code == 0
    result = report(capsys, [trace], tmp_path / "out", *PRESET, "--studies", "table1")["table1"]
    assert len(result["claims"]) == 4
    for claim in result["claims"]:
        assert claim["verdict"] == "holds", claim
        assert claim["low"] > 0.05, claim  # clearly
