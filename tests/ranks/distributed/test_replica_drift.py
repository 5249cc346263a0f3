"""Weights that should be equal on all ranks but drift apart are reported, whatever the reason."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from echelon import Accelerator, distributed as ed
from echelon.base.errors import DesyncError
from echelon.base.warnings import EchelonWarning
from echelon.distributed.checks import replica_drift
from echelon.local_sgd import LocalSGD
from tests.harness import errors_on_ranks, run_on_ranks
from tests.reference import gaussian, mean_square, tanh_net, train_updates

_DRIFT = "rank 0 and rank 1 have different values for"


def _data() -> Any:
    return gaussian(32, 6)


class _Messages:
    """Collects echelon's warnings and errors of a block."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __enter__(self) -> _Messages:
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.texts += [str(w.message) for w in self._caught or [] if w.category is EchelonWarning]
        self._catcher.__exit__(kind, error, traceback)


def _prepared(options: dict[str, Any]) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, seed=0, **options)
    model = tanh_net(6, 5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer, DataLoader(_data(), batch_size=4)))


def _run_fault(fault: str, options: dict[str, Any], folder: str) -> list[str]:
    with _Messages() as messages:
        accelerator, model, optimizer, loader = _prepared(options)
        rank = accelerator.process_index
        shift = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        own = torch.optim.SGD([shift], lr=0.1)
        if fault == "other weights" and rank == 1:
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
        for i, x in enumerate(x for _ in range(5 if fault == "own optimizer" else 1) for x in loader):
            loss = mean_square(model(x + shift))
            accelerator.backward(loss)
            if fault == "other learning rate":
                optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
            if not (
                fault in ("missed step", "missed last step") and rank == 1 and i == (1 if "last" not in fault else 3)
            ):
                optimizer.step()
            if fault == "own optimizer":
                own.step()
                own.zero_grad()
            optimizer.zero_grad()
        if fault == "missed last step":
            if folder:
                accelerator.save_state(folder)
            else:
                accelerator.end_training()
    return messages.texts


def _run_exact() -> None:
    accelerator, model, optimizer, loader = _prepared({"parity": "exact"})
    optimizer.param_groups[0]["lr"] = 0.1 * (accelerator.process_index + 1)
    for x in loader:
        accelerator.backward(mean_square(model(x)))
        optimizer.step()
        optimizer.zero_grad()


_FAULTS = {
    "other weights": ("0.weight before the first step", "before prepare()"),
    "other learning rate": ("lr of parameter group 0 before the first step", "the same learning rate"),
    "missed step": ("0.weight, 0.bias, 2.weight and 1 more after 2 steps of SGD", "step() the same number of times"),
    "own optimizer": ("parameter 0 of shape [6] after 1 step of SGD", "accelerator.prepare()"),
}


# Under zero1 a step is a collective, so no rank can miss one.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("fault", "engine"), [(f, e) for f in _FAULTS for e in ("ddp", "zero1") if (f, e) != ("missed step", "zero1")]
)
def test_drift_is_reported_once(fault: str, engine: str) -> None:
    texts = [text for rank in run_on_ranks(_run_fault, fault, {"engine": engine}, "", world_size=2) for text in rank]
    (text,) = [text for text in texts if _DRIFT in text]
    when, advice = _FAULTS[fault]
    assert when in text
    assert advice in text


def test_drift_is_an_error_under_exact() -> None:
    (text,) = errors_on_ranks(DesyncError, _run_exact, world_size=2, num_errors=1)
    assert "lr of parameter group 0 before the first step" in text


@pytest.mark.parametrize("place", ["save_state", "end_training"])
def test_drift_of_the_last_step_is_reported_at(place: str, tmp_path: Path) -> None:
    folder = str(tmp_path) if place == "save_state" else ""
    texts = [text for rank in run_on_ranks(_run_fault, "missed last step", {}, folder, world_size=2) for text in rank]
    assert [_DRIFT in text and f" at {place}()" in text for text in texts] == [True]


def _end_alone(folder: str) -> tuple[str, float]:
    """Return what a rank prints that ends the training while the other one, which has failed, does not, and the seconds."""
    accelerator, *_ = _prepared({})
    if accelerator.process_index == 1:
        ed.cleanup()
        return "", 0.0
    with open(f"{folder}/stderr", "w+") as file, mock.patch.object(replica_drift, "_LAST_S", 0.3):
        before = os.dup(2)
        os.dup2(file.fileno(), 2)  # torch's C++ code prints
        began = time.monotonic()
        try:
            accelerator.end_training()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return file.read(), time.monotonic() - began


def test_a_rank_that_waits_in_vain_for_the_last_comparison_prints_nothing(tmp_path: Path) -> None:
    printed, seconds = run_on_ranks(_end_alone, str(tmp_path), world_size=2, init_group=False)[0]
    assert printed == ""
    assert seconds >= 0.3  # it did wait


def _run_without_fault(options: dict[str, Any], form: str, folder: str) -> list[str]:
    with _Messages() as messages:
        accelerator, model, optimizer, loader = _prepared(options)
        torch.manual_seed(accelerator.process_index)
        probe = nn.Linear(6, 1, dtype=torch.float64)  # another one on each rank, on purpose
        probe_optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        context = LocalSGD(accelerator, model, 3) if form == "local" else None
        if context is not None:
            context.__enter__()
        for _ in range(3):
            for x in loader:
                accelerator.backward(mean_square(model(x)))
                optimizer.step()
                optimizer.zero_grad()
                if context is not None:
                    context.step()
                mean_square(probe(x)).backward()  # type: ignore[no-untyped-call]
                probe_optimizer.step()
                probe_optimizer.zero_grad()
                for _ in range(2):  # adversarial examples of each batch
                    noise = torch.zeros_like(x).requires_grad_()
                    noise_optimizer = torch.optim.SGD([noise], lr=0.1)
                    noise.grad = torch.randn_like(x)
                    for _ in range(3):
                        noise_optimizer.step()
        if context is not None:
            context.__exit__(None, None, None)
        accelerator.save_state(folder)
        accelerator.end_training()
    return [text for text in messages.texts if _DRIFT in text]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"engine": "ddp"}, ""),
        ({"engine": "zero1"}, ""),
        ({"engine": "fsdp2"}, ""),
        ({"engine": "ddp", "parity": "exact"}, ""),
        ({"engine": "ddp"}, "local"),
    ],
)
def test_runs_without_fault_are_silent(options: dict[str, Any], form: str, tmp_path: Path) -> None:
    assert run_on_ranks(_run_without_fault, options, form, str(tmp_path), world_size=2) == [[], []]


def _join() -> list[str]:
    with _Messages() as messages:
        accelerator = Accelerator(cpu=True)
        bare = tanh_net(6, 5, 1)
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        for _ in range(3):
            with accelerator.join_uneven_inputs([model]):
                for x in _data().view(8, 4, 6)[: 3 + 2 * accelerator.process_index]:
                    accelerator.backward(mean_square(model(x)))
                    optimizer.step()
                    optimizer.zero_grad()
    return [text for text in messages.texts if _DRIFT in text]


def test_joined_ranks_may_step_different_numbers_of_times() -> None:
    assert run_on_ranks(_join, world_size=2) == [[], []]


def _train_raw(form: str, num_epochs: int) -> list[str]:
    with _Messages() as messages, ed.process_group() as world:
        torch.manual_seed(world.rank if form == "own models" else 0)
        bare: Any = nn.Linear(6, 1, dtype=torch.float64)
        model = bare if form in ("no DDP", "own models") else DistributedDataParallel(bare)
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        extra = [scale] if form == "extra parameter" else []
        optimizer = torch.optim.SGD([*model.parameters(), *extra], lr=0.1)
        loader = ed.shard(DataLoader(_data(), batch_size=4), even=True)  # type: ignore[arg-type]
        for x in (x for _ in range(num_epochs) for x in loader):
            optimizer.zero_grad()
            loss = mean_square(model(x) * scale)
            if form == "autograd.grad":
                for p, gradient in zip(bare.parameters(), torch.autograd.grad(loss, list(bare.parameters()))):
                    p.grad = gradient
            else:
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return [text for text in messages.texts if _DRIFT in text]


@pytest.mark.parametrize("form", ["no DDP", "extra parameter", "autograd.grad"])
@pytest.mark.parametrize("num_epochs", [1, 5])
def test_drift_in_a_plain_ddp_loop_is_reported_once(form: str, num_epochs: int) -> None:
    results = run_on_ranks(_train_raw, form, num_epochs, world_size=2, init_group=False)
    (text,) = [text for rank in results for text in rank]
    assert "after 1 step of SGD" in text
    assert "DistributedDataParallel wraps" in text


@pytest.mark.parametrize("form", ["", "own models"])
def test_plain_ddp_loops_without_fault_are_silent(form: str) -> None:
    assert run_on_ranks(_train_raw, form, 5, world_size=2, init_group=False) == [[], []]


def _train_mixed() -> list[torch.Tensor]:
    warnings.filterwarnings("ignore", "the gradients for this step")
    accelerator, model, optimizer, _ = _prepared({})
    part = _data().view(4, 8, 6)[:, accelerator.process_index :: accelerator.num_processes]
    for step, x in enumerate(part):
        loss = mean_square(model(x))
        if step == 0:
            accelerator.backward(loss)
        else:
            optimizer.zero_grad(set_to_none=False)
            own = list(model.parameters())
            for p, gradient in zip(own, torch.autograd.grad(loss, own)):
                p.grad.copy_(gradient)  # the tensor of the previous step
        optimizer.step()
    return [p.detach() for p in accelerator.unwrap_model(model).parameters()]


def test_gradients_that_are_written_into_the_previous_tensors_are_averaged() -> None:
    """Against a plain loop over whole batches: float64, SGD: 1e-12."""
    plain = tanh_net(6, 5, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = train_updates(plain, lambda x: mean_square(plain(x)), _data().view(4, 1, 8, 6), optimizer).weights
    for weights in run_on_ranks(_train_mixed, world_size=2):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
