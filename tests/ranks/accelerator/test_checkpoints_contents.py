"""The table "What a checkpoint holds" in docs/checkpoints.md, against training that is resumed in a process where all state differs.

The reference is a plain loop that never stops: it has the state that a resumed training must have. State that the table says is not
held must not be there, so that no row is forgotten when this changes.
"""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.trainer import Trainer, TrainerCallback
from echelon.utils import ProjectConfiguration
from tests.documents import ROOT
from tests.harness import errors_on_ranks, run_on_ranks
from tests.trainer_models import EndsAfter, arguments

SIZE, STEPS, END = 2, 6, 4
SAVED, RESUMED = 1, 2  # seeds of the first process and of the one that resumes
COLUMNS = ("Accelerator, echelon", "Accelerator, accelerate", "Trainer, echelon", "Trainer, transformers")


class Counts(nn.Module):
    """Counts the forward passes in its extra state: a tensor or a dict."""

    def __init__(self, *, as_tensor: bool) -> None:
        super().__init__()
        self.as_tensor, self.num_calls = as_tensor, 0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.num_calls) if self.as_tensor else {"num_calls": self.num_calls}

    def set_extra_state(self, state: Any) -> None:
        self.num_calls = int(state) if self.as_tensor else state["num_calls"]


class Everything(nn.Module):
    """A model with every kind of state. What ``seed`` changes must come from a checkpoint."""

    updates_buffers = True

    def __init__(self, seed: int, *, has_object: bool, first_seed: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed if first_seed is None else first_seed)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.encoder, self.decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Parameter(torch.full((3,), float(seed)), requires_grad=False)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("temporary", torch.zeros(()), persistent=False)
        self.counts = Counts(as_tensor=True)
        self.objects = Counts(as_tensor=False) if has_object else None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.head(self.decoder((self.encoder(x) + self.first(x)).tanh())).squeeze(-1).float()
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        if self.updates_buffers:
            self.average.mul_(0.9).add_(self.head.bias.detach().sum() + 1)
            self.temporary.add_(1)
            self.counts.num_calls += 1
            if self.objects is not None:
                self.objects.num_calls += 1
        return {"loss": F.mse_loss(y + self.average, labels) * (1 + 0.1 * noise)}


class Counting(torch.optim.SGD):
    """SGD with momentum, and with state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["num_steps"] = self.state.get("num_steps", 0) + 1
        return super().step(closure)


def _model(seed: int, *, is_adapted: bool, has_object: bool) -> tuple[nn.Module, Everything]:
    """Return the model and the ``Everything`` in it."""
    if not is_adapted:
        inner = Everything(seed, has_object=has_object)
        return inner, inner
    import peft

    inner = Everything(seed, has_object=False, first_seed=0)  # the same pretrained weights, but for an unused one
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["first"], init_lora_weights=False)
    model = peft.get_peft_model(inner, config, adapter_name="mine")
    model.add_adapter("other", config)
    model.set_adapter("mine")
    inner.head.requires_grad_(True)
    if seed == RESUMED:
        nn.init.zeros_(inner.head.weight)
    return model, inner


def _optimizer(model: nn.Module) -> tuple[Counting, StepLR]:
    optimizer = Counting([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    return optimizer, StepLR(optimizer, 2, gamma=0.7)


def _rows(world_size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS * SIZE * world_size, 5, generator=generator)
    return [{"x": one[:4], "labels": one[4]} for one in x]


def _batch(step: int, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    start = (step * world_size + rank) * SIZE
    rows = _rows(world_size)[start : start + SIZE]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _seed(rank: int) -> None:
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)


def _facts(model: nn.Module, inner: Everything, optimizer: Any, scheduler: Any, scaler: Any) -> dict[str, list[float]]:
    """Return what there is of each kind of state, by the rows of the table."""

    def values(*tensors: torch.Tensor) -> list[float]:
        return [value for tensor in tensors for value in tensor.detach().double().flatten().tolist()]

    is_adapted = inner is not model
    momenta = [optimizer.state[p]["momentum_buffer"] for g in optimizer.param_groups for p in g["params"]]
    found = {
        "persistent buffers": values(inner.average),
        "buffers with `persistent=False`": values(inner.temporary),
        "extra state (`get_extra_state`): tensors": [inner.counts.num_calls],
        "optimizer state of the parameters": values(*momenta),
        "optimizer state under other keys": [optimizer.state.get("num_steps", 0)],
        "schedulers": [scheduler.last_epoch, *scheduler.get_last_lr()],
        "the loss scaler": list(scaler.state_dict().values()),
        "RNG states (torch, random, numpy)": [float(torch.rand(())), random.random(), float(np.random.rand())],
    }
    if is_adapted:
        adapters = [value for name, value in model.named_parameters() if ".mine." in name or ".other." in name]
        found["adapters (peft), active or not"] = values(*adapters)
        found["weights and buffers trained outside of the adapters"] = values(inner.head.weight, inner.average)
        found["frozen weights of a model with adapters"] = values(inner.frozen)
    else:
        found["trained weights"] = values(inner.head.weight, inner.first.weight)
        found["frozen weights"] = values(inner.frozen)
        found["tied weights"] = [float(inner.encoder.weight is inner.decoder.weight), *values(inner.encoder.weight)]
    if inner.objects is not None:
        found["extra state: other objects"] = [inner.objects.num_calls]
    return found


# ---- the plain loop --------------------------------------------------------------------------------------------------


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _train_plainly(
    world_size: int, *, is_adapted: bool, has_object: bool, scheduler_steps: int, draws_before: int
) -> list[dict[str, list[float]]]:
    """Train in one process that has the random states of each rank; return the facts of each rank."""
    model, inner = _model(SAVED, is_adapted=is_adapted, has_object=has_object)
    optimizer, scheduler = _optimizer(model)
    scaler = torch.amp.GradScaler("cpu")
    states = []
    for rank in range(world_size):
        _seed(rank)
        for _ in range(draws_before):
            torch.empty((), dtype=torch.int64).random_()
        states.append(_random_states())
    for step in range(STEPS):
        for rank in range(world_size):
            _set_random_states(states[rank])
            inner.updates_buffers = rank == 0  # each rank has its own, with the same values
            with torch.autocast("cpu", torch.float16):
                loss = model(**_batch(step, rank, world_size))["loss"]
            scaler.scale(loss).backward()
            states[rank] = _random_states()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= world_size  # not the loss, which would be scaled into the range of float16 earlier
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= scale:
            for _ in range(scheduler_steps):
                scheduler.step()
    found = []
    for rank in range(world_size):
        _set_random_states(states[rank])
        found.append(_facts(model, inner, optimizer, scheduler, scaler))
    return found


# ---- the two levels --------------------------------------------------------------------------------------------------


def _with_accelerator(folder: str, layout: str, seed: int, *, is_adapted: bool, has_object: bool) -> Any:
    project = ProjectConfiguration(checkpoint_format=layout)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", project_config=project)
    model, inner = _model(seed, is_adapted=is_adapted, has_object=has_object)
    wrapped, optimizer, scheduler = accelerator.prepare(model, *_optimizer(model))
    if seed == RESUMED:
        accelerator.load_state(folder)
    else:
        _seed(accelerator.process_index)
    for step in range(END, STEPS) if seed == RESUMED else range(END):
        loss = wrapped(**_batch(step, accelerator.process_index, accelerator.num_processes))["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if seed == SAVED:
        accelerator.save_state(folder)
        return None
    accelerator.save_state(f"{folder}/end")  # which updates the loss scale, otherwise due with the next loss
    return _facts(model, inner, optimizer.optimizer, scheduler.scheduler, accelerator.scaler)


class _Seeds(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            _seed(args.process_index)


def _with_trainer(folder: str, layout: str, seed: int, *, is_adapted: bool, has_object: bool) -> Any:
    model, inner = _model(seed, is_adapted=is_adapted, has_object=has_object)
    optimizer, scheduler = _optimizer(model)
    args = arguments(
        folder, per_device_train_batch_size=SIZE, fp16=True, max_grad_norm=0.0, checkpoint_format=layout,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(
        model,
        args,
        train_dataset=_rows(args.world_size),
        optimizers=(optimizer, scheduler),
        callbacks=[_Seeds(), EndsAfter(END if seed == SAVED else None)],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(belong to no adapter|holds only tensors)")
        trainer.train(resume_from_checkpoint=seed == RESUMED)
    trainer.accelerator.save_state(f"{folder}/end")
    return None if seed == SAVED else _facts(model, inner, optimizer, scheduler, trainer.accelerator.scaler)


# ---- the table -------------------------------------------------------------------------------------------------------


def _table(page: str) -> dict[str, list[str]]:
    """Return the cells of the table by row."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = re.search(r"<!-- held by: tests/ranks/accelerator/test_checkpoints_contents.py -->\n((?:\|.*\n)+)", text)
    assert rows is not None, f"no table in {page}"
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in rows[1].splitlines(keepends=True)]
    return {name: answers for name, *answers in [cells[0], *cells[2:]]}


def _is_close(found: list[float], wanted: list[float]) -> bool:
    """float32, of which the linear layers are rounded to float16 in both: only the order of additions differs."""
    return len(found) == len(wanted) and found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.sample(4)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_table_says_what_a_resumed_training_has(
    tmp_path: Path, is_adapted: bool, column: str, world_size: int
) -> None:
    level, layout = column.split(", ")
    table = _table("checkpoints.md")
    answers = {name: row[COLUMNS.index(column)] for name, row in table.items()}
    options = {
        "is_adapted": is_adapted,
        "has_object": not is_adapted and answers["extra state: other objects"] == "yes",
    }
    train = _with_accelerator if level == "Accelerator" else _with_trainer
    for seed in (SAVED, RESUMED):
        found = run_on_ranks(train, str(tmp_path), layout, seed, **options, world_size=world_size)
    wanted = _train_plainly(
        world_size,
        **options,
        # As Accelerate, which counts the schedule's steps in batches of all processes.
        scheduler_steps=world_size if level == "Accelerator" else 1,
        draws_before=int(level == "Trainer"),  # a loader draws the seed of its workers
    )
    for ours, plain in zip(found, wanted, strict=True):
        held = {name: "yes" if _is_close(ours[name], value) else "no" for name, value in plain.items()}
        assert held == {name: answers[name] for name in held}


@pytest.mark.parametrize("column", COLUMNS)
def test_state_that_a_layout_cannot_hold_is_rejected(tmp_path: Path, column: str) -> None:
    level, layout = column.split(", ")
    if _table("checkpoints.md")["extra state: other objects"][COLUMNS.index(column)] != "error":
        return
    train = _with_accelerator if level == "Accelerator" else _with_trainer
    texts = errors_on_ranks(
        UsageError, train, str(tmp_path), layout, SAVED, is_adapted=False, has_object=True, world_size=1
    )
    assert "objects._extra_state" in texts[0]


def test_the_translated_table_says_the_same() -> None:
    table, translated = _table("checkpoints.md"), _table("checkpoints.zh.md")
    words = {"yes": "是", "no": "否", "error": "报错"}
    assert list(table["state"]) == list(COLUMNS)
    rows = list(table.values())[1:]
    assert list(translated.values())[1:] == [[words[answer] for answer in row] for row in rows]
