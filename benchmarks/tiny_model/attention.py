# SPDX-License-Identifier: Apache-2.0
"""The attention of all three layer types, over sequences short of memory for a square of logits.

A query sees its sliding window and a slot for each run of older tokens. Queries are grouped by
window, so that each group meets the keys of two windows instead of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tiny_model.indexer import hide_unpicked, index_scores, indexer_loss
from benchmarks.tiny_model.layout import SINK_COLUMNS, Layout
from benchmarks.tiny_model.model import CSA, SLIDING
from benchmarks.tiny_model.parts import compress, linear, rms_norm, rotate, rotate_heads


@dataclass
class Indexing:
    """What the indexers do in one pass, and the losses they leave.

    Attributes:
        sparse: the attention reads only their top-k slots.
        loss_rows: int64 `[rows]`, positions to compare them with the attention at; None: no loss.
        losses: one scalar for each CSA layer, in layer order.
    """

    sparse: bool = False
    loss_rows: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Read:
    """Queries of one layer and what they meet.

    Attributes:
        queries: `[batch, length, heads, head_dim]`, scaled.
        near: `[batch, length, heads, 2 * window]`, logits of the keys near by.
        sink: `[batch, length, heads, SINK_COLUMNS]`.
        slots: `[batch, slots, head_dim]`, keys and values at once.
    """

    queries: Tensor
    near: Tensor
    sink: Tensor
    slots: Tensor

    def logits(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Of some rows `[batch, rows, heads, columns]`, columns as in `View`."""
        queries = self.queries[:, rows]
        far = torch.matmul(queries.flatten(1, 2), self.slots.transpose(1, 2))
        far = far.unflatten(1, queries.shape[1:3])
        return torch.cat((self.near[:, rows], far, self.sink[:, rows]), dim=-1)


def attend(attention: nn.Module, x: Tensor, layout: Layout, indexing: Indexing) -> Tensor:
    """What a layer's attention adds, `[batch, length, hidden]`.

    Args:
        attention: the layer's attention module, whose parameters are used.
        x: `[batch, length, hidden]`, in the type to compute in.
        indexing: `losses` grows by one if the layer has an indexer and there are `loss_rows`.
    """
    config = attention.config
    kind = config.layer_types[attention.layer_idx]
    view, rotation = layout.views[kind], layout.rotation_of(kind)
    heads, head_dim, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps

    latent = rms_norm(linear(x, attention.q_a_proj.weight), eps, attention.q_a_norm.weight)
    queries = linear(latent, attention.q_b_proj.weight).unflatten(-1, (heads, head_dim))
    queries = rotate_heads(rms_norm(queries, eps), rotation) * head_dim**-0.5
    keys = rms_norm(linear(x, attention.kv_proj.weight), eps, attention.kv_norm.weight)
    pairs = _pairs_of_windows(rotate(keys, rotation), layout.window)

    if kind == SLIDING:
        slots = keys[:, :0]
    else:
        slots = compress(attention.compressor, x, view.ratio, rotation, eps)
    near = torch.matmul(_by_window(queries, layout.window), pairs.transpose(2, 3))
    sink = F.pad(attention.sinks.to(x.dtype)[:, None], (0, SINK_COLUMNS - 1))
    read = _Read(
        queries,
        near.view(*queries.shape[:3], -1),
        sink.expand(*queries.shape[:2], -1, -1),
        slots,
    )
    bias = view.bias
    if kind == CSA:
        bias = _index(attention, x, latent, read, layout, indexing)

    shares = torch.softmax(read.logits() + bias, dim=-1)
    of_near, of_slots, _ = shares.split(view.widths(layout.window), dim=-1)
    out = torch.matmul(_by_window(of_near, layout.window), pairs).view_as(queries)
    if view.slots:
        out = out + torch.matmul(of_slots.flatten(1, 2), slots).view_as(queries)
    out = rotate_heads(out, rotation.inverse)
    return _project(attention, out)


def _index(
    attention: nn.Module,
    x: Tensor,
    latent: Tensor,
    read: _Read,
    layout: Layout,
    indexing: Indexing,
) -> Tensor:
    """Run a layer's indexer; its gradient ends at its inputs, and selection has none.

    Returns:
        The bias to attend with.
    """
    x, latent, rows = x.detach(), latent.detach(), indexing.loss_rows
    indexer, eps = attention.compressor.indexer, attention.config.rms_norm_eps
    view, rotation = layout.views[CSA], layout.rotation_of(CSA)
    top_k = indexer.index_topk
    selects = indexing.sparse and view.slots > top_k
    if rows is None and not selects:
        return view.bias
    keys = compress(indexer, x, view.ratio, rotation, eps)
    bias = view.bias
    if selects:
        with torch.no_grad():
            scores = index_scores(indexer, x, latent, keys, rotation, x.dtype)
            bias = hide_unpicked(view, layout.window, scores, top_k)
            del scores
    if rows is not None:
        with torch.no_grad():  # all slots, also where the attention itself reads only some
            shares = torch.softmax((read.logits(rows) + view.bias[:, rows]).float(), dim=-1)
            _, of_slots, _ = shares.split(view.widths(layout.window), dim=-1)
        scores = index_scores(
            indexer, x[:, rows], latent[:, rows], keys, rotation.at(rows), torch.float32
        )
        indexing.losses.append(indexer_loss(of_slots.sum(dim=2), scores, view.visible[rows]))
    return bias


def _by_window(rows: Tensor, window: int) -> Tensor:
    """`[batch, length, heads, n]` as `[batch, windows, window * heads, n]`."""
    return rows.unflatten(1, (-1, window)).flatten(2, 3)


def _pairs_of_windows(keys: Tensor, window: int) -> Tensor:
    """Keys of each window after those of the one before it: `[batch, windows, 2 * window, n]`."""
    windows = keys.unflatten(1, (-1, window))
    return torch.cat((F.pad(windows, (0, 0, 0, 0, 1, -1)), windows), dim=2)


def _project(attention: nn.Module, out: Tensor) -> Tensor:
    """Output projection: each group of heads to a low rank, then all to the hidden size."""
    groups = attention.config.o_groups
    weight = attention.o_a_proj.weight.to(out.dtype).unflatten(0, (groups, -1)).transpose(1, 2)
    grouped = out.reshape(out.shape[0] * out.shape[1], groups, -1).transpose(0, 1)
    low = torch.bmm(grouped, weight).transpose(0, 1)
    return linear(low.reshape(*out.shape[:2], -1), attention.o_b_proj.weight)
