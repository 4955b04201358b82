# SPDX-License-Identifier: Apache-2.0
"""The training pass is Transformers' own arithmetic; the indexer learns from attention alone."""

import math

import pytest
import torch

from benchmarks.tiny_model.forward import Forward
from benchmarks.tiny_model.indexer import indexer_loss
from benchmarks.tiny_model.model import BOS
from spin_trtllm.errors import SpinError

ROWS = torch.arange(3, 256, 4)


def random_tokens(length=256):
    tokens = torch.randint(0, BOS, (2, length), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = BOS
    return tokens


@pytest.fixture
def model(small_model):
    """With weights wide enough that scores differ from slot to slot, and biases that are not 0."""
    model = small_model(initializer_range=0.2).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("sinks", "position_bias", "_hc.", "hc_head")):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


@pytest.mark.parametrize("sparse", [False, True])
def test_equals_transformers(model, sparse):
    tokens = random_tokens()
    indexer = model.model.layers[1].self_attn.compressor.indexer
    with torch.no_grad():
        mine = Forward(model, torch.float32)(tokens, sparse=sparse).logits
        if not sparse:
            indexer.index_topk = tokens.shape[1]
        theirs = model(tokens, use_cache=False).logits
    assert theirs.std() > 0.1  # else nearly everything is equal to it
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def test_sparse_differs_from_dense(model):
    forward = Forward(model, torch.float32)
    with torch.no_grad():
        dense, sparse = (forward(random_tokens(), sparse=s).logits for s in (False, True))
    first_choice = 4 * (model.config.index_topk + 1) - 1  # position that sees one slot too many
    torch.testing.assert_close(dense[:, :first_choice], sparse[:, :first_choice])
    assert (dense - sparse)[:, first_choice:].abs().max() > 1e-3


def test_bfloat16_is_close(model):
    with torch.no_grad():
        exact, rounded = (
            Forward(model, dtype)(random_tokens(), sparse=False).logits
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert (exact - rounded).abs().mean() < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("sparse", [False, True])
def test_only_its_own_loss_teaches_the_indexer(model, sparse):
    forward = Forward(model, torch.float32)
    forward(random_tokens(), sparse=sparse).logits.logsumexp(-1).mean().backward()
    taught = {n for n, p in model.named_parameters() if p.grad is not None}
    indexers = {n for n, _ in model.named_parameters() if ".indexer." in n}
    assert taught.isdisjoint(indexers)
    assert taught == {n for n, _ in model.named_parameters()} - indexers

    model.zero_grad(set_to_none=True)
    torch.stack(forward(random_tokens(), loss_rows=ROWS).indexer_losses).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == indexers


def test_target_is_the_attention_of_transformers(model):
    """The loss by its definition, from attention weights and scores that Transformers returns."""
    tokens = random_tokens()
    attention = model.model.layers[1].self_attn
    attention.compressor.indexer.index_topk = tokens.shape[1]
    scores = []
    attention.compressor.indexer.scorer.register_forward_hook(lambda *args: scores.append(args[2]))
    with torch.no_grad():
        weights = model(tokens, use_cache=False, output_attentions=True).attentions[1]
        (mine,) = Forward(model, torch.float32)(tokens, loss_rows=ROWS).indexer_losses
    slots = scores[0].shape[-1]
    total = rows = 0.0
    for batch in range(len(tokens)):
        for row in ROWS.tolist():
            seen = (row + 1) // 4
            paid = weights[batch, :, row, -slots:][:, :seen].sum(0)
            target = (paid / paid.sum()).tolist()
            predicted = scores[0][batch, row, :seen].log_softmax(0).tolist()
            total += sum(p * (math.log(p) - q) for p, q in zip(target, predicted, strict=True))
            rows += 1
    assert mine.item() == pytest.approx(total / rows, rel=1e-3)


def test_indexer_loss_by_hand():
    shares = torch.tensor([[[0.2, 0.2, 0.0], [0.0, 0.0, 0.0]]])  # the second row attends nowhere
    scores = torch.tensor([[[0.0, math.log(3.0), 7.0], [5.0, 1.0, 2.0]]])
    visible = torch.tensor([[True, True, False], [True, True, True]])
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert indexer_loss(shares, scores, visible).item() == pytest.approx(by_hand)


def test_other_lengths_are_refused(model):
    with pytest.raises(SpinError, match="length: got 250, allowed: a multiple of the sliding"):
        Forward(model, torch.float32)(random_tokens(250))
