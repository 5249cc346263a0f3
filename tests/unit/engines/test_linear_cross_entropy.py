"""The loss and gradients in chunks are those of plain cross-entropy, and only one chunk of logits exists at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from echelon import linear_cross_entropy
from echelon.base.errors import UsageError

_PATH = "torch.nn.functional.linear_cross_entropy"
_TOKENS, _FEATURES, _CLASSES = 48, 6, 40


def _inputs(dtype: torch.dtype, *, has_bias: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(4, _TOKENS // 4, _FEATURES), (_CLASSES, _FEATURES)]
    shapes += [(_CLASSES,)] if has_bias else []
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _target() -> torch.Tensor:
    target = torch.randint(_CLASSES, (4, _TOKENS // 4), generator=torch.Generator().manual_seed(1))
    target[0, :5] = -100
    return target


def _run(inputs: list[torch.Tensor], compute: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = compute(inputs)
    (loss * 0.5).backward()
    gradients = [value.grad for value in inputs]
    return loss.detach(), gradients


def _plain(inputs: list[torch.Tensor], **options: Any) -> torch.Tensor:
    hidden, weight, *bias = inputs
    logits = F.linear(hidden, weight, bias[0] if bias else None)
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(wide.flatten(0, 1), _target().flatten(), **options)


def _chunked(inputs: list[torch.Tensor], **options: Any) -> torch.Tensor:
    hidden, weight, *bias = inputs
    return linear_cross_entropy(hidden, weight, _target(), chunk_size=8, bias=bias[0] if bias else None, **options)


@pytest.mark.parametrize("is_ours", [False, True], ids=["torch", "ours"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
def test_loss_and_gradients_are_those_of_plain_cross_entropy(
    options: dict[str, Any], has_bias: bool, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_ours:  # as with torch below 2.13
        monkeypatch.delattr(_PATH, raising=False)
    expected, gradients = _run(_inputs(torch.float64, has_bias=has_bias), lambda i: _plain(i, **options))
    found, own = _run(_inputs(torch.float64, has_bias=has_bias), lambda i: _chunked(i, **options))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for value, reference in zip(own, gradients):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-12)


def _largest_allocation(run: Callable[[], Any]) -> int:
    """Return the bytes of the largest allocation in ``run``; whole logits are larger than all else."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    return max(event.self_cpu_memory_usage for event in record.events())


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("is_ours", [False, True], ids=["torch", "ours"])
def test_the_bytes_of_logits_fall_by_the_number_of_chunks(
    options: dict[str, Any], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_ours:
        monkeypatch.delattr(_PATH, raising=False)
    whole, chunked = _inputs(torch.float64, has_bias=False), _inputs(torch.float64, has_bias=False)
    whole_bytes = _largest_allocation(lambda: _run(whole, lambda i: _plain(i, **options)))
    assert whole_bytes == _TOKENS * _CLASSES * 8
    chunk_bytes = _largest_allocation(lambda: _run(chunked, lambda i: _chunked(i, **options)))
    assert chunk_bytes == whole_bytes // (_TOKENS // 8)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_under_autocast_it_computes_like_a_linear_layer_and_a_loss_in_float32(options: dict[str, Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, gradients = _run(_inputs(torch.float32, has_bias=True), lambda i: _plain(i, **options))
        found, own = _run(_inputs(torch.float32, has_bias=True), lambda i: _chunked(i, **options))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    for value, reference in zip(own, gradients):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, reference, rtol=0, atol=2e-3)  # bf16 has 8 bits; gradients are below 0.1


def test_a_chunk_without_tokens_and_another_reduction_are_refused() -> None:
    hidden, weight = _inputs(torch.float32, has_bias=False)
    with pytest.raises(UsageError, match="reduction='none' is not one of mean, sum"):
        linear_cross_entropy(torch.ones(1, 2), torch.ones(3, 2), torch.ones(1).long(), chunk_size=1, reduction="none")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="chunk_size=0 is below 1"):
        linear_cross_entropy(hidden, weight, _target(), chunk_size=0)
