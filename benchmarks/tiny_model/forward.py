# SPDX-License-Identifier: Apache-2.0
"""The whole model in training: the arithmetic of Transformers' DeepSeek-V4 on its own parameters.

Transformers' forward pass makes logits of all queries by all keys, which 32K tokens leave no memory
for, and returns no indexer scores to learn from. This one is equal to it within rounding; a test
holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM

from benchmarks.tiny_model.attention import Indexing, attend
from benchmarks.tiny_model.layout import Layout
from benchmarks.tiny_model.parts import linear, rms_norm

Streams = list[Tensor]  # of the hyper-connections, `[batch, length, hidden]` each


@dataclass(frozen=True)
class Output:
    """What a pass returns.

    Attributes:
        logits: float32 `[batch, length, vocabulary]`.
        indexer_losses: a scalar for each CSA layer; empty where none was asked for.
        expert_loads: float32 `[experts]` for each layer, share of tokens routed to each.
    """

    logits: Tensor
    indexer_losses: list[Tensor]
    expert_loads: list[Tensor]


class Forward:
    """Forward passes over a model's parameters, in a type of choice."""

    def __init__(self, model: DeepseekV4ForCausalLM, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self._layouts: dict[int, Layout] = {}

    def __call__(
        self, tokens: Tensor, *, sparse: bool = False, loss_rows: Tensor | None = None
    ) -> Output:
        """Args:
            tokens: int64 `[batch, length]`, the length a multiple of the sliding window.
            sparse: whether the attention reads only the indexer's top-k slots.
            loss_rows: int64 `[rows]`, positions to teach the indexers at; None: no losses.

        Raises:
            SpinError: another length.
        """
        model = self.model.model
        layout = self._layout(tokens)
        indexing = Indexing(sparse, loss_rows)
        loads: list[Tensor] = []
        embedded = F.embedding(tokens, model.embed_tokens.weight).to(self.dtype)
        streams = [embedded] * self.model.config.hc_mult
        eps = self.model.config.rms_norm_eps
        for layer in model.layers:
            mix = _Mix(layer.attn_hc, streams, eps)
            x = rms_norm(mix.collapsed, eps, layer.input_layernorm.weight)
            streams = mix.expand(attend(layer.self_attn, x, layout, indexing))
            mix = _Mix(layer.ffn_hc, streams, eps)
            x = rms_norm(mix.collapsed, eps, layer.post_attention_layernorm.weight)
            added, load = mix_experts(layer.mlp, x)
            loads.append(load)
            streams = mix.expand(added)
        x = rms_norm(self._collapse(streams), eps, model.norm.weight)
        logits = linear(x, self.model.lm_head.weight).float()
        return Output(logits, indexing.losses, loads)

    def _layout(self, tokens: Tensor) -> Layout:
        length = tokens.shape[1]
        if length not in self._layouts:
            self._layouts.clear()  # lengths change a few times in a run, and masks are large
            layout = Layout(self.model.config, length, self.dtype, tokens.device)
            self._layouts[length] = layout
        return self._layouts[length]

    def _collapse(self, streams: Streams) -> Tensor:
        head = self.model.model.hc_head
        flat = rms_norm(torch.cat(streams, dim=-1), self.model.config.rms_norm_eps)
        shares = torch.sigmoid(linear(flat, head.hc_fn).float() * head.hc_scale + head.hc_base)
        return _weighted_sum((shares + head.eps).to(self.dtype), streams)


class _Mix:
    """One hyper-connection: streams to one input, and one output back to streams."""

    def __init__(self, connection: nn.Module, streams: Streams, eps: float) -> None:
        count = len(streams)
        flat = rms_norm(torch.cat(streams, dim=-1), eps)
        widths = (count, count, count * count)
        raw = linear(flat, connection.fn).float().split(widths, dim=-1)
        bias, scale = connection.base.split(widths), connection.scale
        take, give, blend = (raw[i] * scale[i] + bias[i] for i in range(3))
        blend = _doubly_stochastic(
            blend.unflatten(-1, (count, count)), connection.hc_sinkhorn_iters, connection.hc_eps
        )
        self._streams = streams
        self._give = (2 * torch.sigmoid(give)).to(flat.dtype)
        self._blend = blend.to(flat.dtype)
        take = (torch.sigmoid(take) + connection.hc_eps).to(flat.dtype)
        self.collapsed = _weighted_sum(take, streams)

    def expand(self, added: Tensor) -> Streams:
        """Streams after the layer: each a blend of all, plus its share of what the layer adds."""
        return [
            _weighted_sum(
                self._blend[..., number],
                self._streams,
                self._give[..., number : number + 1] * added,
            )
            for number in range(len(self._streams))
        ]


def _doubly_stochastic(raw: Tensor, iterations: int, eps: float) -> Tensor:
    """Positive matrices `[..., n, n]` scaled until rows and columns sum to 1 (Sinkhorn)."""
    matrix = torch.softmax(raw, dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


def _weighted_sum(shares: Tensor, streams: Streams, start: Tensor | None = None) -> Tensor:
    """`start` plus the streams, each times its share.

    Args:
        shares: `[batch, length, streams]`.
    """
    for share, stream in zip(shares.unsqueeze(-1).unbind(-2), streams, strict=True):
        start = share * stream if start is None else torch.addcmul(start, share, stream)
    assert start is not None
    return start


def mix_experts(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Routed and shared experts. All experts see all tokens, and those not chosen weigh 0.

    With four small experts of which two are chosen, sorting tokens costs more than it saves.

    Args:
        x: `[batch, length, hidden]`.

    Returns:
        What the block adds, as `x`; and the share of tokens routed to each expert, float32.
    """
    gate, experts, shared = block.gate, block.experts, block.shared_experts
    tokens = x.flatten(0, 1)
    scores = gate.score_fn(F.linear(tokens.float(), gate.weight.float()))
    best = (scores + gate.e_score_correction_bias).topk(gate.top_k, dim=-1, sorted=False).indices
    chosen = torch.zeros_like(scores).scatter(1, best, 1.0)
    weights = scores * chosen
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
    weights = F.pad(weights, (0, 1), value=1.0).to(x.dtype)  # the shared expert, as it is

    up = torch.cat(
        (experts.gate_up_proj.flatten(0, 1), shared.gate_proj.weight, shared.up_proj.weight)
    )
    gates, values = linear(tokens, up).unflatten(-1, (weights.shape[-1], -1)).chunk(2, dim=-1)
    limit = shared.limit
    inner = F.silu(gates.clamp(max=limit)) * values.clamp(-limit, limit) * weights.unsqueeze(-1)
    down = torch.cat(
        (experts.down_proj.permute(1, 0, 2).flatten(1), shared.down_proj.weight), dim=1
    )
    return linear(inner.flatten(1), down).view_as(x), chosen.detach().mean(dim=0)
