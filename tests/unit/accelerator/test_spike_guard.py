"""The rule of ``spike_guard``: median, deviation, warm-up and the limit for losses that hardly vary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.accelerator.update.spike_guard import Spike
from echelon.base.errors import ConfigError
from tests.prepared_loop import train_prepared


def _spikes(losses: list[float], factor: float | None = None) -> list[int]:
    """Return the indices of the losses at which a loop with these losses takes no step."""
    accelerator = Accelerator(cpu=True, spike_guard="skip", spike_factor=factor)
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model = nn.ParameterList([weight])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([weight], lr=1.0))
    skipped = []
    for i, loss in enumerate(losses):
        accelerator.backward((model[0] * 0.0).sum() + loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped += [i] if optimizer.step_was_skipped else []
    return skipped


# 33 losses of 1 to 33: the median is 17, the median absolute deviation 8, the limit 17 + factor * 1.4826 * 8.
_EVEN = [float(1 + i * 10 % 33) for i in range(33)]


@pytest.mark.parametrize(
    ("losses", "factor", "expected"),
    [
        ([*_EVEN, 17 + 10 * 1.4826 * 8 + 0.01], None, [33]),
        ([*_EVEN, 17 + 10 * 1.4826 * 8 - 0.01], None, []),
        ([*_EVEN, 17 + 2 * 1.4826 * 8 + 0.01], 2.0, [33]),
        ([2.0] * 15 + [100.0], None, []),  # during the warm-up
        ([2.0] * 16 + [2.19, 2.21, 100.0], None, [17, 18]),  # ten times one percent of the median
        ([2.0, math.nan, 2.0, -math.inf], None, [1, 3]),
        ([-1.0] * 16 + [-0.95, -0.85], None, [17]),
        ([50.0] * 40 + [1.0] * 64 + [2.0], None, [104]),  # only the last 64 count
        ([1.0] * 20 + [100.0, 1.0, 100.0], None, [20, 22]),  # a loss that was dropped is not compared with
    ],
)
def test_a_loss_far_above_the_median_of_those_before_is_a_spike(
    losses: list[float], factor: float | None, expected: list[int]
) -> None:
    assert _spikes(losses, factor) == expected


def test_a_norm_that_is_not_finite_is_a_spike_although_the_loss_is_finite() -> None:
    accelerator = Accelerator(cpu=True, spike_guard="skip")
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    model, optimizer = accelerator.prepare(nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.5))
    for is_bad in (False, True, False):
        loss = model[0].sum() + (
            (model[0] * 0.0).sqrt().sum() if is_bad else 0.0
        )  # the gradient of sqrt(0) is infinite
        accelerator.backward(loss)
        assert torch.isfinite(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is is_bad
    assert weight.item() == pytest.approx(0.0, abs=1e-5)  # two steps of 0.5; clip_grad_norm_ adds 1e-6 to the norm


def test_buffers_of_a_loop_are_those_of_a_plain_loop_without_the_batch() -> None:
    batches = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(1))
    batches[5] *= float("nan")
    expected, model = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for batch in (*batches[:5], *batches[6:]):
        expected(batch)
    accelerator = Accelerator(cpu=True, spike_guard="skip")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    train_prepared(accelerator, model, optimizer, batches)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_a_factor_without_a_guard_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"spike_factor=5.0 has no effect without spike_guard"):
        Accelerator(cpu=True, spike_factor=5.0)


def test_a_first_loss_that_is_not_finite_is_told_without_a_median() -> None:
    spike = Spike(step=3, loss=math.nan, median=math.nan, samples=None)
    assert str(spike) == "step 3: the loss nan is a spike (there are no losses to compare it with)"
