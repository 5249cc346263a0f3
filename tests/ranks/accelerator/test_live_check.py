"""``verify_every``: correct loops raise nothing, and each planted fault is named with its stage and tensor."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    LocalSGD,
)
from echelon.accelerator.current import living_accelerators
from echelon.base.errors import VerificationError
from echelon.trainer import Trainer
from tests.harness import errors_on_ranks, run_on_ranks
from tests.prepared_loop import all_warnings
from tests.trainer_models import CONSTANT_SGD, Net as TrainedNet, arguments, net_data

ENGINES = ("ddp", "zero1", "fsdp2")


class Net(nn.Module):
    def __init__(self, *, dropout: float = 0.0, norm: bool = False, hidden: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(6, hidden)
        self.norm = nn.BatchNorm1d(hidden) if norm else nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(hidden, 3)
        self.register_buffer("offset", torch.full((3,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.norm(self.first(x)).relu())) + self.offset


def _data(num: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num, 6, generator=generator), torch.randint(3, (num,), generator=generator))


def _seed(accelerator: Accelerator) -> None:
    """Give each rank its own dropout masks, after the models were built alike."""
    torch.manual_seed(100 + accelerator.process_index)


# ---- correct loops -------------------------------------------------------------------------------------------------------


def _correct_loop(seed: int, engine: str, parity: str) -> tuple[int, list[str]]:
    """Train with settings drawn from ``seed``; return the number of checks and the stages that were compared."""
    draw = random.Random(seed)
    accumulation = draw.choice([1, 1, 2, 3])
    accelerator = Accelerator(
        cpu=True,
        engine=engine,
        parity=parity,
        seed=3 if parity != "off" else None,
        gradient_accumulation_steps=accumulation if parity == "off" or draw.random() < 0.5 else 1,
        verify_every=draw.choice([1, 1, 2, 3]),
    )
    torch.manual_seed(0)
    bitwise = parity == "bitwise"
    model: Any = Net(
        dropout=draw.choice([0.0, 0.3]), norm=draw.random() < 0.3 and parity == "off", hidden=draw.choice([5, 12, 70])
    )
    if draw.random() < 0.3:
        model.double()
    dtype = model.last.weight.dtype
    kind: Callable[..., Any] = draw.choice([torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
    optimizer = kind(model.parameters(), lr=0.05)
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(_data(draw.choice([30, 48])), batch_size=draw.choice([4, 6]), shuffle=draw.random() < 0.5)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    _seed(accelerator)
    max_norm = draw.choice([None, 0.05, 100.0])
    counts_items, evaluates = draw.random() < 0.5, draw.random() < 0.5
    zeroes_first = draw.random() < 0.5
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                if zeroes_first:
                    optimizer.zero_grad()
                loss = F.cross_entropy(model(x.to(dtype)), y)
                accelerator.backward(loss, num_items=len(x) if counts_items and not bitwise else None)
                if max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                schedule.step()
                if not zeroes_first:
                    optimizer.zero_grad()
        if evaluates:
            model.eval()
            with torch.no_grad():
                for x, _ in loader:
                    accelerator.gather_for_metrics(model(x.to(dtype)))
            model.train()
    check = accelerator.session.live_check
    assert check is not None
    accelerator.end_training()
    return check.num_checks, sorted(check.compared)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("engine", "parity"), [("ddp", "off"), ("fsdp2", "exact"), ("zero1", "bitwise")])
def test_correct_loops_raise_nothing(engine: str, parity: str) -> None:
    for num_checks, compared in run_on_ranks(_correct_loop, 10, engine, parity):
        assert num_checks >= 2
        assert {"reduce", "optimizer", "weights", "loss weight"} <= set(compared)


@pytest.mark.soak
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("parity", ["off", "exact", "bitwise"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_correct_loops_raise_nothing(engine: str, parity: str, world_size: int) -> None:
    for seed in range(100, 112):
        run_on_ranks(_correct_loop, seed, engine, parity, world_size=world_size, timeout=120)


# ---- planted faults ------------------------------------------------------------------------------------------------------

Plant = Callable[..., None]


def _train(engine: str, fault: str, action: str = "stop") -> None:
    """Train six updates of which every second one is checked, with a fault in the fourth one."""
    parity = "exact" if fault in ("same_masks", "wrong_factor") else "off"
    accumulation = 2 if fault in ("early_clip", "cleared", "wrong_factor") else 1
    accelerator = Accelerator(
        cpu=True,
        engine=engine,
        parity=parity,
        gradient_accumulation_steps=accumulation,
        verify_every=1 if fault == "noisy_step" else 2,
        verify_action=action,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)] if fault == "stale_buffer" else [],
    )
    warnings.filterwarnings("ignore", ".*broadcast_buffers.* is deprecated", FutureWarning)
    if fault in ("not_reduced", "noisy_step"):  # from the first update on, which the check of the weights reports, too
        warnings.filterwarnings("ignore", ".*train different models")
    torch.manual_seed(0)
    model: Any = Net(dropout=0.5 if fault == "same_masks" else 0.0)
    if fault == "not_reduced":
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["first.weight"])
    optimizer: Any = (Noisy if fault == "noisy_step" else torch.optim.AdamW)(model.parameters(), lr=0.05)
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    loader: Any = DataLoader(_data(160), batch_size=16 if parity != "off" else 8, shuffle=True)
    if fault == "same_samples":
        loader = DataLoader(_data(160), batch_size=8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = accelerator.prepare_data_loader(loader, already_sharded=True)
    else:
        loader = accelerator.prepare(loader)
    _seed(accelerator)
    rank = accelerator.process_index
    plant = FAULTS[fault].plant
    bare = accelerator.unwrap_model(model)
    named = dict(bare.named_parameters())
    batches = iter(loader)
    for number in range(6 * accumulation):
        is_on = number // accumulation == 3

        def at(place: str, is_on: bool = is_on) -> None:
            if is_on:
                plant(place, rank, bare, named, optimizer, accelerator)

        x, y = next(batches)
        with accelerator.accumulate(model):
            at("start")
            if fault == "same_masks" and is_on:
                torch.manual_seed(5)
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss, num_items=len(x) + 1 if fault == "wrong_factor" else None)
            at("backward")
            if fault == "early_clip" or accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.01 if "clip" in fault else 100.0)
            at("clipped")
            if not (fault == "missed_step" and is_on and rank == 1):
                optimizer.step()
            at("stepped")
            schedule.step()
            optimizer.zero_grad()
    accelerator.end_training()


class Noisy(torch.optim.SGD):
    """An optimizer that draws random numbers of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["params"][0].add_(1e-3 * torch.randn(()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _change_gradient(place: str, rank: int, model: Any, named: Any, *_: Any) -> None:
    if place == "backward" and rank == 1:
        with torch.no_grad():
            _local(named["last.weight"].grad).mul_(1.01)


def _drift(place: str, rank: int, model: Any, named: Any, *_: Any) -> None:
    if place == "start" and rank == 1:
        with torch.no_grad():
            named["first.bias"][0].add_(1e-6)


def _change_rate(place: str, rank: int, _model: Any, _named: Any, optimizer: Any, *_: Any) -> None:
    if place == "start" and rank == 1:
        optimizer.param_groups[0]["lr"] *= 1.5


def _clip_by_own_norm(place: str, _rank: int, _model: Any, named: Any, *_: Any) -> None:
    if place == "backward":
        gradients = [_local(p.grad) for p in named.values()]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(0.01 / norm)


def _clear_in_place(place: str, _rank: int, _model: Any, named: Any, _optimizer: Any, accelerator: Accelerator) -> None:
    if place == "backward" and not accelerator.sync_gradients:
        named["last.bias"].grad.zero_()


def _step_twice_on_one_rank(place: str, rank: int, _model: Any, _named: Any, optimizer: Any, *_: Any) -> None:
    if place == "stepped" and rank == 1:
        optimizer.step()


def _stale_buffer(place: str, rank: int, model: Any, *_: Any) -> None:
    if place == "start" and rank == 1:
        model.offset.fill_(0.5)


def _change_state(place: str, rank: int, _model: Any, named: Any, optimizer: Any, *_: Any) -> None:
    if place == "backward" and rank == 1:
        optimizer.optimizer.state[named["last.weight"]]["exp_avg"].mul_(2)


def _patch(name: str, wrap: Callable[[Any], Any]) -> Plant:
    def plant(place: str, _rank: int, _model: Any, _named: Any, _optimizer: Any, accelerator: Accelerator) -> None:
        inner = accelerator.session.engine.inner  # type: ignore[attr-defined]
        if place == "start" and name not in vars(inner):
            setattr(inner, name, wrap(getattr(inner, name)))

    return plant


def _twice(step: Any) -> Any:
    def run(optimizer: Any, **options: Any) -> bool:
        step(optimizer, **options)
        return bool(step(optimizer, **options))

    return run


def _scaled(factor: float) -> Callable[[Any], Any]:
    def wrap(backward: Any) -> Any:
        def run(loss: torch.Tensor, *rest: Any, **options: Any) -> None:
            backward(loss, *rest, **options)
            for model in next(iter(living_accelerators()))._models:
                for p in model.parameters():
                    _local(p.grad).mul_(factor)

        return run

    return wrap


def _by_half_the_norm(clip: Any) -> Any:
    def run(parameters: Any, max_norm: float, norm_type: float, **options: Any) -> torch.Tensor:
        return torch.as_tensor(clip(parameters, 2 * max_norm, norm_type, **options) / 2)

    return run


def _nothing(*_: Any) -> None:
    """The fault is in the loop or in what it prepares."""


@dataclass(frozen=True)
class Fault:
    plant: Plant
    stage: str
    tensor: str = ""
    engines: tuple[str, ...] = ENGINES


REPLICATED = ("ddp", "zero1")
FAULTS = {
    "gradient_changed": Fault(_change_gradient, "reduce", "last.weight"),
    "not_reduced": Fault(_nothing, "reduce", "first.weight", REPLICATED),
    "cleared": Fault(_clear_in_place, "reduce", "last.bias", REPLICATED),
    "wrong_factor": Fault(_patch("finish_gradients", lambda _: _nothing), "reduce", "weight"),
    "averaged_twice": Fault(_patch("backward", _scaled(0.5)), "reduce", "weight"),
    "added": Fault(_patch("backward", _scaled(2.0)), "reduce", "weight"),
    "drift": Fault(_drift, "weights", "first.bias", REPLICATED),
    "rate": Fault(_change_rate, "scheduler"),
    "clip_by_own_norm": Fault(_clip_by_own_norm, "clip", "", ("fsdp2",)),
    "clip_by_wrong_norm": Fault(_patch("clip_grad_norm", _by_half_the_norm), "clip"),
    "early_clip": Fault(_nothing, "clip", "", REPLICATED),
    "same_samples": Fault(_nothing, "data"),
    "same_masks": Fault(_nothing, "rng"),
    "stale_buffer": Fault(_stale_buffer, "buffers", "offset"),
    "state": Fault(_change_state, "optimizer", "last.weight", ("ddp",)),
    "noisy_step": Fault(_nothing, "optimizer", "first.weight", ("ddp",)),
    "step_within_step": Fault(_patch("step", _twice), "optimizer", "weight", ("ddp", "fsdp2")),
    "two_steps_on_one_rank": Fault(_step_twice_on_one_rank, "optimizer", "", ("ddp",)),
    "missed_step": Fault(_nothing, "optimizer", "", ("ddp",)),
}
QUICK = [
    "gradient_changed",
    "not_reduced",
    "rate",
    "clip_by_wrong_norm",
    "same_samples",
    "same_masks",
    "missed_step",
    "drift",
]
ALL_FAULTS = [
    pytest.param(fault, engine, marks=[] if fault in QUICK and engine == facts.engines[-1] else [pytest.mark.soak])
    for fault, facts in FAULTS.items()
    for engine in facts.engines
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("fault", "engine"), ALL_FAULTS)
def test_a_planted_fault_is_named(fault: str, engine: str) -> None:
    expected = FAULTS[fault]
    for text in errors_on_ranks(VerificationError, _train, engine, fault, num_errors=2):
        assert f"stage {expected.stage}," in text, text
        assert expected.tensor in text, text
        assert "update 4 " in text or fault in ("not_reduced", "early_clip", "same_samples", "noisy_step"), text
        assert f"verify_every={1 if fault == 'noisy_step' else 2} (from code Accelerator(verify_every=))" in text


def _train_with_warnings() -> list[str]:
    with all_warnings() as caught:
        _train("ddp", "gradient_changed", "warn")
    return [str(one.message) for one in caught if "verify_every" in str(one.message)]


def test_a_mismatch_can_be_a_warning_on_rank_zero() -> None:
    first, second = run_on_ranks(_train_with_warnings)
    assert second == []
    # The weights of the two ranks differ from then on.
    assert "update 4 " in first[0]
    assert "the gradient of last.weight on rank 1 only" in first[0]
    assert "update 6 " in first[1]
    assert "stage weights" in first[1]


# ---- loops that are checked only in part ---------------------------------------------------------------------------------


def _alternate() -> set[str]:
    """Two models and two optimizers that take turns."""
    accelerator = Accelerator(cpu=True, verify_every=2)
    torch.manual_seed(0)
    models: list[Any] = [Net(), Net()]
    optimizers: list[Any] = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    loader: Any = DataLoader(_data(), batch_size=6)
    *prepared, loader = accelerator.prepare(*models, *optimizers, loader)
    models, optimizers = prepared[:2], prepared[2:]
    check = accelerator.session.live_check
    assert check is not None
    for x, y in loader:
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    accelerator.end_training()
    assert check.num_checks >= 3
    return check.compared


def _prepared(num: int = 48, kind: Any = torch.optim.SGD, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    """Return an Accelerator that checks each update, and a model, an optimizer and a loader that it has prepared."""
    accelerator = Accelerator(cpu=True, verify_every=1, **options)
    torch.manual_seed(0)
    model = Net()
    loader = DataLoader(_data(num), batch_size=6)
    return accelerator, *accelerator.prepare(model, kind(model.parameters(), lr=0.01), loader)


def _num_checks(accelerator: Accelerator) -> int:
    accelerator.end_training()
    assert accelerator.session.live_check is not None
    return accelerator.session.live_check.num_checks


def _two_losses(parity: str) -> int:
    accelerator, model, optimizer, loader = _prepared(parity=parity, seed=None if parity == "off" else 3)
    for x, y in loader:
        num_items = None if parity == "off" else int((y > 0).sum())  # another number on each rank and in each update
        accelerator.backward(F.cross_entropy(model(x), y), num_items=num_items)
        accelerator.backward(model(x).square().mean(), num_items=num_items)
        optimizer.step()
        optimizer.zero_grad()
    return _num_checks(accelerator)


def _closures(kind: str) -> int:
    made = partial(torch.optim.LBFGS, max_iter=3) if kind == "LBFGS" else torch.optim.SGD
    accelerator, model, optimizer, loader = _prepared(kind=made)
    for x, y in loader:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    return _num_checks(accelerator)


def _half_precision() -> int:
    """fp16 on the CPU, with steps that the scaler skips."""
    scaling = GradScalerKwargs(init_scale=2.0**18, growth_interval=2)
    accelerator, model, optimizer, loader = _prepared(96, mixed_precision="fp16", kwargs_handlers=[scaling])
    num_skipped = 0
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        num_skipped += accelerator.optimizer_step_was_skipped
    assert _num_checks(accelerator) == len(loader)
    return num_skipped


def _local_steps() -> int:
    accelerator, model, optimizer, loader = _prepared()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return accelerator.num_processes


def _uneven() -> int:
    config = DataLoaderConfiguration(even_batches=False)
    accelerator, model, optimizer, loader = _prepared(18, dataloader_config=config)
    for _ in range(2):
        with accelerator.join_uneven_inputs([model]):
            for x, y in loader:
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.num_processes


def test_alternating_optimizers_are_all_checked() -> None:
    for compared in run_on_ranks(_alternate):
        assert {"reduce", "optimizer"} <= compared


@pytest.mark.parametrize(("parity", "num_updates"), [("off", 4), ("exact", 8), ("bitwise", 8)])
def test_several_losses_are_one_update(parity: str, num_updates: int) -> None:
    assert run_on_ranks(_two_losses, parity) == [num_updates] * 2


@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_closures_are_checked(kind: str) -> None:
    assert run_on_ranks(_closures, kind) == [4, 4]


def test_steps_that_the_scaler_skips_are_the_same_on_all_ranks() -> None:
    for num_skipped in run_on_ranks(_half_precision):
        assert 0 < num_skipped < 8


@pytest.mark.parametrize("loop", [_local_steps, _uneven])
def test_updates_that_are_local_on_purpose_are_not_compared(loop: Callable[[], int]) -> None:
    assert run_on_ranks(loop) == [2, 2]


def _train_with_trainer(folder: str, action: str) -> tuple[int, int]:
    args = arguments(
        folder,
        **{**CONSTANT_SGD, "max_grad_norm": 0.1},
        gradient_accumulation_steps=2,
        verify_every=2,
        verify_action=action,
    )
    trainer = Trainer(TrainedNet(), args, train_dataset=net_data(32))
    trainer.train()
    check = trainer.accelerator.session.live_check
    assert check is not None
    return check.num_checks, trainer.state.global_step


def test_a_trainer_checks_its_updates(tmp_path: Path) -> None:
    for num_checks, num_steps in run_on_ranks(_train_with_trainer, str(tmp_path), "stop"):
        assert num_checks in (num_steps // 2, num_steps // 2 - 1)  # the last update is not followed by another one
        assert num_checks
