"""What an optimizer has beside the state of trained parameters comes back: groups that are frozen or empty, and state of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.base.errors import CheckpointError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint.formats.accelerate import export_accelerate, import_accelerate
from echelon.checkpoint.formats.conversion import write_imported
from echelon.checkpoint.read import Checkpoint
from echelon.trainer import Trainer, TrainerCallback
from tests.harness import run_on_ranks
from tests.prepared_loop import share_of
from tests.reference import gaussian
from tests.trainer_models import Net, arguments, net_data

ENGINES = [("single", 1), ("ddp", 2), ("zero1", 2), ("fsdp2", 2)]
NUM_STEPS, SAVED, UNFROZEN = 10, 4, 6


class Growing(torch.optim.SGD):
    """SGD whose steps grow with their number, which it keeps under a key that is no parameter, and again in its state dict."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        of_all = self.state["all"]  # type: ignore[index]
        of_all["calls"] = of_all.get("calls", 0) + 1
        of_all["factor"] = of_all.get("factor", torch.ones((), dtype=torch.float64)) * 1.25
        self.scale *= 0.9
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    size = group["lr"] * of_all["calls"] * float(of_all["factor"]) * self.scale
                    parameter.add_(parameter.grad, alpha=-size)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.scale = state_dict["scale"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "scale"})


def _objects(kind: str, lr: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 1)).double()
    model[0].requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": [*layer.parameters()], "lr": lr * (i + 1)} for i, layer in enumerate(model)
    ]
    groups.insert(1, {"params": [], "lr": 7 * lr})
    optimizer = Growing(groups, lr=lr) if kind == "growing" else torch.optim.AdamW(groups, lr=lr)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def _train(accelerator: Any, objects: Any, steps: range) -> None:
    model, optimizer, schedule = objects
    for step in steps:
        if step == UNFROZEN:
            (model if accelerator is None else accelerator.unwrap_model(model))[0].requires_grad_(True)
        x = gaussian(6, 4, seed=step).double()
        loss = (model(x if accelerator is None or accelerator.num_processes == 1 else share_of(x)) - 1).square().mean()
        (loss.backward if accelerator is None else lambda: accelerator.backward(loss))()  # noqa: B023
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@contextmanager
def _ignored(*messages: str) -> Iterator[None]:
    with warnings.catch_warnings():
        for message in messages:
            warnings.filterwarnings("ignore", message=message)
        yield


def _resumed(folder: str, kind: str, engine: str, format_: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with one optimizer, save, go on with another one that begins with other rates."""

    def prepared(lr: float) -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, engine=engine, step_scheduler_with_optimizer=False)
        return accelerator, accelerator.prepare(*_objects(kind, lr))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHELON_CHECKPOINT_FORMAT", format_)
        accelerator, objects = prepared(0.01)
        _train(accelerator, objects, range(SAVED))
        accelerator.save_state(folder)
        accelerator.free_memory()
        accelerator, objects = prepared(0.5)
        with _ignored("loading the checkpoint sets initial_lr"):
            accelerator.load_state(folder)
        _train(accelerator, objects, range(SAVED, NUM_STEPS))
    return accelerator.get_state_dict(objects[0]) or {}, _rates(objects[1])


def _plain(kind: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    objects = _objects(kind, 0.01)
    _train(None, objects, range(NUM_STEPS))
    return objects[0].state_dict(), _rates(objects[1])


@pytest.mark.sample(4)
@pytest.mark.parametrize(("engine", "world_size"), ENGINES)
@pytest.mark.parametrize("format_", ["echelon", "accelerate"])
@pytest.mark.parametrize("kind", ["adamw", "growing"])
def test_a_resumed_run_goes_on_like_the_plain_loop(
    kind: str, format_: str, engine: str, world_size: int, tmp_path: Path
) -> None:
    state, rates = _plain(kind)
    found = run_on_ranks(_resumed, str(tmp_path / "s"), kind, engine, format_, world_size=world_size)
    for _, of_rank in found:
        assert of_rank == pytest.approx(rates, rel=1e-15)
    for name, value in state.items():  # float64: the ranks' sums round differently, Adam divides by small numbers
        torch.testing.assert_close(found[0][0][name], value, rtol=1e-9, atol=1e-9)


def test_the_state_is_read_by_other_engines_and_layouts(tmp_path: Path) -> None:
    state, rates = _plain("growing")

    def check(folder: Path, engine: str, world_size: int) -> None:
        found = run_on_ranks(_loaded, str(folder), engine, world_size=world_size)
        torch.testing.assert_close(found[0][0], dict(state), rtol=1e-9, atol=1e-9)
        assert found[0][1] == pytest.approx(rates, rel=1e-15)

    run_on_ranks(_saved, str(tmp_path / "own"), "zero1")
    for engine, world_size in (("single", 1), ("fsdp2", 2)):
        check(tmp_path / "own", engine, world_size)
    (tmp_path / "accelerate").mkdir()
    export_accelerate(Checkpoint(tmp_path / "own"), tmp_path / "accelerate")
    check(tmp_path / "accelerate", "ddp", 2)
    write_imported(import_accelerate(tmp_path / "accelerate"), tmp_path / "again", source=tmp_path / "accelerate")
    check(tmp_path / "again", "zero1", 2)


def _saved(folder: str, engine: str) -> None:
    accelerator = Accelerator(cpu=True, engine=engine, step_scheduler_with_optimizer=False)
    objects = accelerator.prepare(*_objects("growing", 0.01))
    _train(accelerator, objects, range(SAVED))
    accelerator.save_state(folder)


def _loaded(folder: str, engine: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    accelerator = Accelerator(cpu=True, engine=engine, step_scheduler_with_optimizer=False)
    objects = accelerator.prepare(*_objects("growing", 0.5))
    with _ignored(".*contains RNG states for .* process", "loading the checkpoint sets initial_lr"):
        accelerator.load_state(folder)
    _train(accelerator, objects, range(SAVED, NUM_STEPS))
    return accelerator.get_state_dict(objects[0]) or {}, _rates(objects[1])


def _saved_with(folder: str, made: Callable[[Any], torch.optim.Optimizer], *, loads: bool) -> list[dict[str, Any]]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, made(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    if loads:
        accelerator.load_state(folder)
    else:
        accelerator.save_state(folder)
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def test_a_checkpoint_of_another_class_of_optimizer_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "s")
    _saved_with(folder, torch.optim.AdamW, loads=False)
    with pytest.raises(
        CheckpointError, match=r"the options amsgrad, betas, .*, but the SGD of this run has dampening, momentum"
    ):
        _saved_with(folder, torch.optim.SGD, loads=True)


def test_options_that_the_checkpoint_changes_are_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "s")
    _saved_with(folder, partial(torch.optim.SGD, lr=0.1), loads=False)
    with pytest.warns(EchelonWarning) as heard:
        (group,) = _saved_with(folder, partial(torch.optim.SGD, lr=0.1, momentum=0.9), loads=True)
    assert group["momentum"] == 0
    (warning,) = heard
    assert (
        "loading the checkpoint sets momentum=0 in parameter group 0 of the SGD, in place of this run's momentum=0.9"
        in str(warning.message)
    )


# ---- the Trainer ---------------------------------------------------------------------------------------------------------


class _Unfreezes(TrainerCallback):
    def __init__(self, model: Net, end: int) -> None:
        self.model, self.end = model, end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model.layers[0].requires_grad_(state.global_step >= UNFROZEN)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.end


def _trainer(folder: str, format_: str, lr: float, *, end: int, resume: bool) -> tuple[list[torch.Tensor], list[float]]:
    model = Net()
    model.layers[0].requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": [*model.layers[0].parameters()], "lr": 5 * lr}]
    groups.append({"params": [*model.layers[1:].parameters()], "lr": lr})
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    args = arguments(
        folder,
        per_device_train_batch_size=3,
        max_steps=NUM_STEPS,
        save_strategy="steps",
        save_steps=SAVED,
        checkpoint_format=format_,
    )
    trainer = Trainer(
        model, args, train_dataset=net_data(60), optimizers=(optimizer, schedule), callbacks=[_Unfreezes(model, end)]
    )
    with _ignored("loading the checkpoint sets initial_lr"):
        trainer.train(resume_from_checkpoint=resume or None)
    return [p.detach().clone() for p in model.parameters()], _rates(optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("format_", ["echelon", "transformers"])
def test_a_resumed_trainer_keeps_the_rates_of_a_frozen_group(format_: str, world_size: int, tmp_path: Path) -> None:
    whole = run_on_ranks(
        _trainer, str(tmp_path / "whole"), format_, 0.01, end=NUM_STEPS, resume=False, world_size=world_size
    )
    folder = str(tmp_path / "parts")
    run_on_ranks(_trainer, folder, format_, 0.01, end=SAVED, resume=False, world_size=world_size)
    again = run_on_ranks(_trainer, folder, format_, 0.3, end=NUM_STEPS, resume=True, world_size=world_size)
    # The same start without an interruption, whose rates are a formula: 0.7 for each step.
    assert whole[0][1] == pytest.approx([0.05 * 0.7**NUM_STEPS, 0.01 * 0.7**NUM_STEPS])
    for of_whole, of_again in zip(whole, again):
        assert of_again[1] == of_whole[1]
        torch.testing.assert_close(
            of_again[0], of_whole[0], rtol=1e-6, atol=1e-7
        )  # float32, other sums after a new start
