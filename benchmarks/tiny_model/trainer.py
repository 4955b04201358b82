# SPDX-License-Identifier: Apache-2.0
"""One optimizer step, and everything that a run must keep to go on exactly where it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import DeepseekV4ForCausalLM

from benchmarks.tiny_model.batches import Batch
from benchmarks.tiny_model.forward import Forward
from benchmarks.tiny_model.stages import Stage
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file

_MOST_SKIPPED = 20  # steps without a finite gradient; more, and the run is lost
_BALANCE = 1e-3  # what an expert's bias moves by, a step, towards an even load
_SPARED = ("embed", "_hc.", "position_bias")  # matrices without weight decay


@dataclass(frozen=True)
class Measured:
    """Figures of one step, on the device until someone asks for them.

    Attributes:
        text_loss: mean nats a byte over plain texts.
        recall: share of answer bytes picked right; NaN where nothing was asked.
        indexer_losses: nats for each CSA layer; empty where the indexer is not taught.
        gradient_norm: of everything but the indexer, before clipping.
    """

    text_loss: Tensor
    recall: Tensor
    indexer_losses: Tensor
    gradient_norm: Tensor


class Trainer:
    """A model in a stage of its training.

    Attributes:
        next_step: `0 .. stage.steps`; the latter once the stage is done.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        stage: Stage,
        seed: int,
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        model: on the device to train on; on a GPU it computes in bfloat16, elsewhere in float32.
        seed: of the batches, kept with the state.
        inputs: what else decides the run, such as digests of text and first weights, by name; kept
            with the state as well.
        """
        self.model = model.train()
        self.stage = stage
        self.seed = seed
        self.inputs = dict(inputs or {})
        self.next_step = 0
        device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        self._forward = Forward(model, torch.bfloat16 if on_gpu else torch.float32)
        groups = _parameter_groups(model)
        *of_model, self._of_indexer = (group["params"] for group in groups)
        self._of_model = [parameter for group in of_model for parameter in group]
        self._optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=(0.9, 0.95), eps=1e-9, fused=on_gpu
        )
        self._skipped = 0

    def step(self, batch: Batch) -> Measured:
        """Take the next step of the stage.

        Args:
            batch: that step's, on the model's device.

        Raises:
            SpinError: gradients have not been finite too often.
        """
        phase = self.stage.phase_at(self.next_step)
        rate, indexer_rate = self.stage.learning_rates_at(self.next_step)
        for group in self._optimizer.param_groups:
            group["lr"] = indexer_rate if group["indexer"] else rate

        rows = batch.loss_rows if phase.teach_indexer else None
        output = self._forward(batch.tokens, sparse=phase.sparse, loss_rows=rows)
        logits, targets = output.logits.flatten(0, 1), batch.targets
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
        indexer_losses = torch.stack(output.indexer_losses) if rows is not None else losses[:0, 0]
        ((losses * batch.weights).mean() + indexer_losses.sum()).backward()

        norm = clip_grad_norm_(self._of_model, 1.0)
        indexer_norm = clip_grad_norm_(self._of_indexer, 1.0)
        if torch.isfinite(norm + indexer_norm):
            self._optimizer.step()
        else:
            self._skip()
        self._optimizer.zero_grad(set_to_none=True)
        self._balance_experts(output.expert_loads)
        self.next_step += 1

        with torch.no_grad():
            right = (output.logits.argmax(dim=-1) == targets) & batch.asked
            return Measured(
                text_loss=losses[: batch.texts].mean(),
                recall=right.sum() / batch.asked.sum(),
                indexer_losses=indexer_losses.detach(),
                gradient_norm=norm.detach(),
            )

    def _skip(self) -> None:
        """Leave out a step whose gradient is not finite: one overflow costs a step, not the run."""
        self._skipped += 1
        if self._skipped > _MOST_SKIPPED:
            raise SpinError(f"training: {self._skipped} steps without a finite gradient")

    def _balance_experts(self, loads: list[Tensor]) -> None:
        """Nudge the routers towards experts that got less than their share, without a loss."""
        with torch.no_grad():
            for layer, load in zip(self.model.model.layers, loads, strict=True):
                bias = layer.mlp.gate.e_score_correction_bias
                bias.add_(torch.sign(load.mean() - load), alpha=_BALANCE)

    def save_state(self, path: Path) -> None:
        """Write weights, optimizer and step; an interrupted write leaves the old file."""
        state = {
            "stage": self.stage,
            "seed": self.seed,
            "inputs": self.inputs,
            "next_step": self.next_step,
            "skipped": self._skipped,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        with atomic_file(path) as temporary:
            torch.save(state, temporary)

    def load_state(self, path: Path) -> None:
        """Go on from a file of `save_state`; on the CPU every later step is bit for bit the same.

        Raises:
            SpinError: not such a file, or of a run with another stage, seed or input.
        """
        try:
            # Not weights only: the stage is kept with them. The file is this program's own.
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        except Exception as error:  # torch raises whatever its unpickler raises
            raise SpinError(f"state: cannot read {str(path)!r}: {error}") from error
        # A state of before inputs were kept says of none of them that it is the same.
        kept = {"stage": state["stage"], "seed": state["seed"], **state.get("inputs", {})}
        for name, own in {"stage": self.stage, "seed": self.seed, **self.inputs}.items():
            if kept.get(name) != own:
                refuse(f"{name} of {str(path)!r}", kept.get(name), f"{own}, or an empty output")
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.next_step, self._skipped = state["next_step"], state["skipped"]


def _parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups with weight decay of their own: matrices, everything else, and last the indexers."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    indexers: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            indexers.append(parameter)
        elif parameter.ndim >= 2 and not any(part in name for part in _SPARED):
            matrices.append(parameter)
        else:
            others.append(parameter)
    return [
        {"params": matrices, "weight_decay": 0.1, "indexer": False},
        {"params": others, "weight_decay": 0.0, "indexer": False},
        {"params": indexers, "weight_decay": 0.01, "indexer": True},
    ]
