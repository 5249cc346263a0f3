"""Dropout masks of a recorded run belong to samples, not to ranks or places in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from echelon.verify.parts import record_everything
from echelon.verify.recorders.batches import Batches
from echelon.verify.recorders.keyed_dropout import KeyedDropout, keyed_mask
from echelon.verify.recording import recording
from echelon.verify.trace import Note, RecordingSettings, Rng, read_trace
from tests.harness import run_on_ranks


class _Body(nn.Module):
    """Calls ``body(x)``, with a weight that makes it trainable."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.body = body

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.body(*inputs) * self.weight


@contextmanager
def _recorded(folder: Path, *, rank: int = 0) -> Iterator[None]:
    with recording(folder, RecordingSettings(steps=100), rank=rank) as one:
        KeyedDropout(one, Batches(one))
        yield


def _attention(x: torch.Tensor, p: float = 0.4) -> torch.Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p, is_causal=True).transpose(1, 2).flatten(2)


_BODIES = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "in place": lambda x: F.dropout(x * 1.0, 0.3, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "channels": lambda x: F.dropout1d(x, 0.3),
    "alpha channels": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "two": lambda x: F.dropout(F.dropout(x, 0.3), 0.3),
    "attention": _attention,
    "seq first": lambda x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "heads in dim 0": lambda x: F.dropout(x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1), 0.3).unflatten(
        0, (-1, 2)
    ),
}


@pytest.mark.parametrize("name", _BODIES)
def test_a_sample_keeps_its_mask_in_any_batch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 5, 6)
    model = _Body(_BODIES[name])
    order = [5, 2, 7, 0]
    with _recorded(tmp_path):
        whole = model(x)
        before = torch.get_rng_state()
        part, alone = model(x[order]), model(x[3:4])
        assert torch.equal(torch.get_rng_state(), before)
    # matrix products of another batch size may round differently
    torch.testing.assert_close(part, whole[order], atol=1e-6, rtol=0)
    torch.testing.assert_close(alone, whole[3:4], atol=1e-6, rtol=0)
    assert not torch.equal(model(x), whole)


def _sharded(folder: str, x: torch.Tensor) -> torch.Tensor:
    rank = torch.distributed.get_rank()
    with _recorded(Path(folder) / "ranks", rank=rank):
        return _Body(lambda x: F.dropout(x, 0.3))(x[rank::2]).detach()


def test_ranks_draw_the_masks_of_one_process(tmp_path: Path) -> None:
    x = torch.randn(8, 5)
    parts = run_on_ranks(_sharded, str(tmp_path), x, world_size=2)
    with _recorded(tmp_path / "one"):
        whole = _Body(lambda x: F.dropout(x, 0.3))(x)
    assert torch.equal(parts[0], whole[0::2])
    assert torch.equal(parts[1], whole[1::2])


def test_a_state_of_the_generator_returns_only_if_it_is_set_back(tmp_path: Path) -> None:
    """Each update with masks takes one number, so that seeding alike in each update shows."""
    model, states = _Body(lambda x: F.dropout(x, 0.5)), []
    with recording(tmp_path, RecordingSettings(steps=4), rank=0) as one:
        record_everything(one)
        for update in range(5):
            if update > 1:
                torch.manual_seed(3)
            for _ in range(2):  # micro-steps
                model(torch.ones(2 + update, 3)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    states = [one.torch for one in read_trace(tmp_path).ranks[0] if isinstance(one, Rng) and one.micro_step == 0]
    assert len(set(states)) == 3
    assert states[2] == states[3]


def test_a_padded_sample_keeps_its_masks(tmp_path: Path) -> None:
    """Attention weights have both dimensions padded."""
    ids = torch.arange(3, 9).reshape(2, 3)
    padded = F.pad(ids, (0, 4))
    body = lambda ids: F.dropout(torch.ones(len(ids), 2, ids.size(1), ids.size(1)), 0.5)  # noqa: E731
    with _recorded(tmp_path):
        short, long = _Body(body)(ids), _Body(body)(padded)
    assert torch.equal(long[:, :, :3, :3], short)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_keep_the_right_share_and_look_independent(p: float) -> None:
    """Tolerances: 5 standard deviations of the binomial distribution."""
    keys = torch.arange(64)
    mask = keyed_mask(keys, torch.Size((64, 100, 100)), layout=(0, 1), key=7, p=p).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(mask.mean() - (1 - p)) < 5 * sigma / mask.numel() ** 0.5
    centered = (mask - (1 - p)) / sigma
    for other in (centered.roll(1, 0), centered.roll(1, 1), centered.roll(1, 2), centered.transpose(1, 2).triu(1) * 2):
        assert abs((centered * other).mean()) < 10 / mask.numel() ** 0.5
    per_column = mask.mean(dim=0)
    assert (abs(per_column - (1 - p)) < 6 * sigma / 8).all()
    again = keyed_mask(keys, torch.Size((64, 100, 100)), layout=(0, 1), key=8, p=p).double()
    assert abs((centered * (again - (1 - p)) / sigma).mean()) < 5 / mask.numel() ** 0.5


@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradients_are_those_of_dropout(inplace: bool, tmp_path: Path) -> None:
    x = torch.randn(6, 50, requires_grad=True)
    with _recorded(tmp_path):
        out = _Body(lambda x: F.dropout(x * 1.0, 0.25, inplace=inplace))(x)
        out.sum().backward()
    kept = out != 0
    torch.testing.assert_close(out, torch.where(kept, x / 0.75, 0.0), rtol=1e-6, atol=0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept / 0.75, rtol=1e-6, atol=0)
    assert 0.5 < kept.double().mean() < 0.95


def test_alpha_dropout_keeps_mean_and_variance(tmp_path: Path) -> None:
    """Tolerance: about 6 standard errors of 400,000 values."""
    x = torch.randn(100, 4000)
    with _recorded(tmp_path):
        out = _Body(lambda x: F.alpha_dropout(x, 0.4, training=True))(x)
    assert abs(out.mean()) < 0.01
    assert abs(out.var() - 1) < 0.02


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_its_masks_is_that_of_torch(causal: bool, tmp_path: Path) -> None:
    """Almost no dropout: the mask keeps everything."""
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    with _recorded(tmp_path):
        got = _Body(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, is_causal=causal))(q, k, v)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, is_causal=causal))


@pytest.mark.parametrize("mask", [torch.ones(5, 5).tril().bool(), torch.randn(2, 1, 5, 5)], ids=["bool", "float"])
def test_attention_with_masks_is_that_of_torch(mask: torch.Tensor, tmp_path: Path) -> None:
    q, kv = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    options: dict[str, Any] = {"attn_mask": mask, "scale": 0.2, "enable_gqa": True}
    with _recorded(tmp_path):
        got = _Body(lambda q, kv: F.scaled_dot_product_attention(q, kv, kv, dropout_p=1e-12, **options))(q, kv)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, kv, kv, **options))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_draws_its_masks_again(reentrant: bool, tmp_path: Path) -> None:
    """The same gradients as without checkpointing, also with a mask before and between two blocks."""
    x = torch.randn(4, 32)
    block = lambda x: F.dropout(F.dropout(x, 0.2) * x, 0.2)  # noqa: E731

    def plain(x: torch.Tensor) -> torch.Tensor:
        return block(F.dropout(block(F.dropout(x, 0.2)), 0.2))

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(block, F.dropout(x, 0.2), use_reentrant=reentrant)
        return checkpoint(block, F.dropout(x, 0.2), use_reentrant=reentrant)

    gradients = []
    for body in (plain, checkpointed):
        inputs = x.clone().requires_grad_()
        with _recorded(tmp_path):
            _Body(body)(inputs).square().sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients)
    assert gradients[0].count_nonzero() > 0


def test_the_part_tells_whether_masks_are_drawn_and_restores_torch(tmp_path: Path) -> None:
    names = [
        (owner, name)
        for owner in (torch, torch._VF, F)
        for name in ("dropout", "scaled_dot_product_attention")
        if hasattr(owner, name)
    ]
    before = [getattr(owner, name) for owner, name in names]
    x = torch.randn(3, 4)
    with _recorded(tmp_path):
        _Body(lambda x: F.dropout(x, 0.5))(x)
        _Body(lambda x: F.dropout(x, 0.0))(x)
        _Body(lambda x: x + torch.rand(4))(x)
        _Body(lambda x: F.dropout(x, 0.5)).eval()(x)
        _Body(lambda x: F.dropout(x.flatten()[:5], 0.5)[0])(x)
    assert [getattr(owner, name) for owner, name in names] == before
    events = read_trace(tmp_path).ranks[0]
    assert [one.draws_masks for one in events if isinstance(one, Rng)] == [True, False, True, True]
    notes = [one.text for one in events if isinstance(one, Note)]
    assert any("draws random numbers in training other than those of dropout" in text for text in notes)
    assert any("a dropout mask of shape [5] has no dimension of samples" in text for text in notes)
