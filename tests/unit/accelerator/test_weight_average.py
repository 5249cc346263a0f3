"""EMA and SWA on one process: which steps and parameters count, what is saved, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from echelon import EMA, SWA, Accelerator
from echelon.base.errors import CheckpointError, ConfigError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint.formats.accelerate import export_accelerate
from echelon.checkpoint.formats.merged_weights import merge
from echelon.checkpoint.read import Checkpoint

LEARNING_RATE = 0.1


def _net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def _copy(parameters: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parameters]


def _step(accelerator: Accelerator, model: nn.Module, optimizer: Any, seed: int, factor: float = 1.0) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    accelerator.backward(model(x).float().square().mean() * factor)
    optimizer.step()
    optimizer.zero_grad()


def _prepared(*averages: Any, **options: Any) -> Any:
    accelerator, model = Accelerator(cpu=True, **options), _net()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), *averages)


def test_steps_that_loss_scaling_skips_do_not_count() -> None:
    accelerator, model = Accelerator(cpu=True, mixed_precision="fp16"), _net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, ema, swa = accelerator.prepare(model, optimizer, EMA(0.5), SWA(1))
    history = [_copy(model.parameters())]
    for number in range(4):
        _step(accelerator, model, optimizer, number, factor=1e30 if number == 1 else 1.0)
        assert accelerator.optimizer_step_was_skipped is (number == 1)
        if number != 1:
            history.append(_copy(model.parameters()))
    expected = history[0]
    for weights in history[1:]:
        expected = [0.5 * a + 0.5 * w for a, w in zip(expected, weights)]
    assert (ema.num_updates, swa.num_updates) == (3, 3)
    with ema.average_parameters():
        torch.testing.assert_close(_copy(model.parameters()), expected, rtol=1e-6, atol=0)
    with swa.average_parameters():
        mean = [sum(ws) / 3 for ws in zip(*history[1:])]
        torch.testing.assert_close(_copy(model.parameters()), mean, rtol=1e-5, atol=1e-8)


def test_low_precision_weights_are_averaged_in_float32() -> None:
    accelerator, model = Accelerator(cpu=True), _net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, ema = accelerator.prepare(model, optimizer, EMA(0.999))
    expected = [p.detach().float() for p in model.parameters()]
    for number in range(6):
        _step(accelerator, model, optimizer, number)
        expected = [0.999 * a + 0.001 * p.detach().float() for a, p in zip(expected, model.parameters())]
    ((_, values),) = ema.parts()
    for parameter, reference in zip(model.parameters(), expected):
        torch.testing.assert_close(values[parameter], reference, rtol=1e-6, atol=1e-7)
    before = _copy(model.parameters())
    with ema.average_parameters():
        assert all(torch.equal(p, value.bfloat16()) for p, value in zip(model.parameters(), expected))
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before))


def test_a_parameter_that_is_unfrozen_later_has_its_frozen_value_in_the_average_before() -> None:
    accelerator, model = Accelerator(cpu=True), _net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, ema, swa = accelerator.prepare(model, optimizer, EMA(0.9), SWA(2))
    history = [_copy(model.parameters())]
    for number in range(6):
        if number == 4:
            model[0].requires_grad_(True)
        _step(accelerator, model, optimizer, number)
        history.append(_copy(model.parameters()))
    assert not torch.equal(history[4][0], history[5][0])
    expected = history[0]
    for weights in history[1:]:
        expected = [0.9 * a + 0.1 * w for a, w in zip(expected, weights)]
    with ema.average_parameters():
        torch.testing.assert_close(_copy(model.parameters()), expected, rtol=0, atol=1e-12)
    with swa.average_parameters():
        mean = [sum(ws) / 5 for ws in zip(*history[2:])]
        torch.testing.assert_close(_copy(model.parameters()), mean, rtol=0, atol=1e-12)


def test_only_the_optimizers_of_the_same_call_are_averaged() -> None:
    accelerator = Accelerator(cpu=True)
    one, two = _net(), _net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=LEARNING_RATE) for model in (one, two)]
    two, second = accelerator.prepare(two, optimizers[1])
    one, first, ema = accelerator.prepare(one, optimizers[0], EMA(0.9))
    for number in range(2):
        _step(accelerator, one, first, number)
        _step(accelerator, two, second, number)
    before = _copy(one.parameters()), _copy(two.parameters())
    with ema.average_parameters():
        assert not any(torch.equal(p, value) for p, value in zip(one.parameters(), before[0]))
        assert all(torch.equal(p, value) for p, value in zip(two.parameters(), before[1]))


def test_copying_the_averages_ends_their_use_and_nothing_changes_before_the_first_update() -> None:
    accelerator, model, optimizer, swa = _prepared(SWA(3))
    before = _copy(model.parameters())
    with swa.average_parameters():
        assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before))
    history = []
    for number in range(4):
        _step(accelerator, model, optimizer, number)
        history.append(_copy(model.parameters()))
    swa.copy_to_models()
    expected = [(a + b) / 2 for a, b in zip(history[2], history[3])]
    torch.testing.assert_close(_copy(model.parameters()), expected, rtol=0, atol=1e-12)


# ---- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_averages_is_refused_unless_they_may_be_missing(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared()
    _step(accelerator, model, optimizer, 0)
    accelerator.save_state(tmp_path / "without")
    accelerator, model, optimizer, ema = _prepared(EMA(0.9))
    _step(accelerator, model, optimizer, 1)
    with pytest.raises(CheckpointError, match=r"contains 0 averages of the weights, but this run has 1"):
        accelerator.load_state(tmp_path / "without")
    with pytest.warns(EchelonWarning, match="has no averages of the weights, so the EMA"):
        accelerator.load_state(tmp_path / "without", allow_missing=["average"])
    loaded = _copy(model.parameters())
    _step(accelerator, model, optimizer, 2)
    expected = [0.9 * a + 0.1 * p for a, p in zip(loaded, model.parameters())]
    with ema.average_parameters():
        torch.testing.assert_close(_copy(model.parameters()), expected, rtol=0, atol=1e-12)
    accelerator.save_state(tmp_path / "with")
    accelerator, *_ = _prepared()
    with pytest.raises(CheckpointError, match=r"allow_missing=\('average\[0\]',\)"):
        accelerator.load_state(tmp_path / "with")
    with pytest.warns(EchelonWarning, match=r"holds averages of the weights \(EMA\)"):
        accelerator.load_state(tmp_path / "with", allow_missing=["average[0]"])


def test_another_decay_is_announced_and_another_kind_refused(tmp_path: Path) -> None:
    accelerator, model, optimizer, _ = _prepared(EMA(0.9))
    _step(accelerator, model, optimizer, 0)
    accelerator.save_state(tmp_path / "state")
    accelerator, *_ = _prepared(EMA(0.99))
    with pytest.warns(EchelonWarning, match=r"continues with this run's EMA\(decay=0.99.*was saved with decay=0.9"):
        accelerator.load_state(tmp_path / "state")
    accelerator, *_ = _prepared(SWA(1))
    with pytest.raises(CheckpointError, match="holds an average of the weights by EMA, but this run has SWA"):
        accelerator.load_state(tmp_path / "state")


def test_accelerates_format_holds_no_averages(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared()
    accelerator.save_state(tmp_path / "plain", safe_serialization=False)
    accelerator, model, optimizer, ema = _prepared(EMA(0.9))
    with pytest.raises(UsageError, match=r"format cannot hold the EMA\(decay=0.9"):
        accelerator.save_state(tmp_path / "averaged", safe_serialization=False)
    _step(accelerator, model, optimizer, 0)
    with pytest.warns(EchelonWarning, match="has no averages of the weights, so the EMA.*starts with its weights"):
        accelerator.load_state(tmp_path / "plain")
    start = _copy(model.parameters())
    with ema.average_parameters():
        assert all(torch.equal(p, value) for p, value in zip(model.parameters(), start))


def test_other_layouts_lose_no_average_silently(tmp_path: Path) -> None:
    accelerator, model, optimizer, _ = _prepared(EMA(0.9))
    _step(accelerator, model, optimizer, 0)
    accelerator.save_state(tmp_path / "state")
    for folder in ("accelerate", "merged"):
        (tmp_path / folder).mkdir()
    with pytest.raises(
        CheckpointError, match=r"has an average of the weights \(EMA\), which other layouts do not have"
    ):
        export_accelerate(Checkpoint(tmp_path / "state"), tmp_path / "accelerate")
    with pytest.warns(EchelonWarning, match="the merged weights are those of training"):
        merge(tmp_path / "state", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(merged[name], p) for name, p in model.named_parameters())


# ---- what is refused ---------------------------------------------------------------------------------------------------


def _step_inside(accelerator: Any, model: Any, optimizer: Any, ema: Any) -> None:
    with ema.average_parameters():
        _step(accelerator, model, optimizer, 1)


def _load_inside(accelerator: Any, _model: Any, _optimizer: Any, ema: Any) -> None:
    with ema.average_parameters():
        accelerator.load_state("anywhere")


def _prepare_twice(_accelerator: Any, _model: Any, _optimizer: Any, ema: Any) -> None:
    _prepared(ema)


def _nest_another(accelerator: Any, _model: Any, _optimizer: Any, ema: Any) -> None:
    other = accelerator.prepare(EMA(0.5))
    with ema.average_parameters(), other.average_parameters():
        accelerator.save_state("anywhere")


def _prepare_alone(*_: Any) -> None:
    Accelerator(cpu=True).prepare(EMA(0.9))


def _use_unprepared(*_: Any) -> None:
    with SWA(1).average_parameters():
        pass


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (_step_inside, r"optimizer.step\(\) was called inside average_parameters\(\)"),
        (_load_inside, r"load_state\(\) was called inside average_parameters\(\)"),
        (_prepare_twice, "got an EMA that another Accelerator has prepared"),
        (_nest_another, r"EMA\(decay=0.5, .*\).average_parameters\(\) was called inside average_parameters\(\)"),
        (_prepare_alone, "got an EMA, but no optimizer"),
        (_use_unprepared, "the SWA was not prepared"),
    ],
)
def test_what_would_average_the_wrong_weights_is_refused(use: Callable[..., None], text: str) -> None:
    accelerator, model, optimizer, ema = _prepared(EMA(0.9))
    _step(accelerator, model, optimizer, 0)
    with pytest.raises(UsageError, match=text):
        use(accelerator, model, optimizer, ema)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EMA(1.5),
        lambda: EMA("0.9"),  # type: ignore[arg-type]
        lambda: EMA(0.9, every=0),
        lambda: EMA(0.9, every=1.5),  # type: ignore[arg-type]
        lambda: SWA(0),
        lambda: SWA(1.5),  # type: ignore[arg-type]
    ],
)
def test_settings_without_a_meaning_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError):
        make()
