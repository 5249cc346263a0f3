"""A prepared model on two ranks is torch's DDP, with the weights of a loop with DDP by hand; parameters without a gradient are named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon import Accelerator, DistributedDataParallelKwargs
from echelon.base.errors import UsageError
from echelon.trainer import Trainer, TrainingArguments
from tests.harness import run_on_ranks
from tests.prepared_loop import marked_line
from tests.reference import mean_square, train_updates

WIDTH = 384  # a MiB of gradients


class _Branches(nn.Module):
    """Has dropout, and a layer that only some passes use, the same ones on both ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.sometimes = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        x = nn.functional.dropout(torch.tanh(self.first(x)), 0.2)
        return self.second(x + self.sometimes(x) if uses_all else x)  # type: ignore[no-any-return]


def _every_pass(number: int) -> dict[str, Any]:
    return {}


def _every_other_pass(number: int) -> dict[str, Any]:
    return {"uses_all": number % 2 == 0}


LOOPS: dict[str, tuple[Callable[[int], dict[str, Any]], int, dict[str, Any]]] = {
    "plain": (_every_pass, 1, {}),
    "several buckets": (_every_pass, 1, {"bucket_cap_mb": 0.3}),
    "static graph": (_every_pass, 1, {"static_graph": True}),
    "unused layers": (_every_other_pass, 1, {"find_unused_parameters": True}),
    "two passes before each step": (_every_pass, 2, {}),
}
"""The arguments of each pass, the backward passes per step, and the options of DDP."""


def _train(name: str, wrapper: Any, optimizer: Any, backward: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """Return the gradients of each step and the weights at the end."""
    arguments, num_passes, _ = LOOPS[name]
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    seen: list[torch.Tensor] = []
    for number in range(6):
        torch.manual_seed(100 * number + dist.get_rank())  # dropout
        backward(wrapper(torch.randn(5, WIDTH, generator=draw), **arguments(number)).square().mean())
        if number % num_passes == num_passes - 1:
            seen += [torch.full((), -7.0) if p.grad is None else p.grad.clone() for p in wrapper.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return seen + [p.detach().clone() for p in wrapper.parameters()]


def _both() -> dict[str, tuple[bool, list[torch.Tensor], list[torch.Tensor]]]:
    found = {}
    for name, (_, _, options) in LOOPS.items():
        bare = _Branches()
        by_hand = DistributedDataParallel(bare, **options)
        optimizer: Any = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
        expected = _train(name, by_hand, optimizer, torch.Tensor.backward)
        bare = _Branches()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9))
        found[name] = (
            type(model) is DistributedDataParallel,
            expected,
            _train(name, model, optimizer, accelerator.backward),
        )
        accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def loops() -> list[dict[str, tuple[bool, list[torch.Tensor], list[torch.Tensor]]]]:
    return run_on_ranks(_both, world_size=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LOOPS)
def test_gradients_and_weights_are_those_of_ddp_by_hand(name: str, loops: Any) -> None:
    for rank in range(2):
        is_torchs, expected, own = loops[rank][name]
        assert is_torchs
        assert len(own) == len(expected)
        assert all(map(torch.equal, own, expected))  # the same operations, so not one bit differs
    assert all(map(torch.equal, loops[0][name][2], loops[1][name][2]))


class _HalfUsed(nn.Module):
    """Uses ``first`` always, and ``second`` if the input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        self.second = nn.Linear(2, 1, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), 1):
                parameter.fill_(number / 4)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        y = self.first(x) + (self.second(x) if bool((x > 0).all()) else 0.0)
        return y if labels is None else {"loss": (y - labels).square().mean()}


POSITIVE, MIXED = torch.ones(2, 2, dtype=torch.float64), torch.tensor([[-1.0, 2.0]], dtype=torch.float64)


def _train_unused(batches: list[torch.Tensor], how: str, engine: str) -> tuple[str, list[torch.Tensor]]:
    looks = [DistributedDataParallelKwargs(find_unused_parameters=True)] if how == "looks" else []
    accelerator = Accelerator(cpu=True, engine=engine, kwargs_handlers=looks)
    bare = _HalfUsed()
    if how == "frozen":
        bare.second.requires_grad_(False)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    before = [p.detach().clone() for p in bare.parameters()]
    try:
        for x in batches:
            loss = model(x).square().mean()  # FORWARD
            accelerator.backward(loss)
            if how == "clips":
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # CLIP
            if how != "never steps":
                optimizer.step()  # STEP
                optimizer.zero_grad()
    except UsageError as error:
        torch.testing.assert_close(
            list(bare.parameters()), before, rtol=0, atol=0
        )  # no step with half of the gradients
        return str(error), []
    return "", [p.detach() for p in bare.parameters()]


def _plain(batches: list[torch.Tensor], *, freezes: bool) -> list[torch.Tensor]:
    model = _HalfUsed()
    if freezes:
        model.second.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_updates(model, lambda x: mean_square(model(x)), [[x] for x in batches], optimizer).weights


@pytest.mark.parametrize(
    ("how", "engine", "mark"),
    [("steps", "ddp", "STEP"), ("steps", "zero1", "STEP"), ("clips", "ddp", "CLIP"), ("never steps", "ddp", "FORWARD")],
)
def test_unused_parameters_are_named_before_a_step_uses_the_others(how: str, engine: str, mark: str) -> None:
    for text, _ in run_on_ranks(_train_unused, [MIXED, MIXED], how, engine, world_size=2):
        assert (
            "2 of the 3 trainable parameters received no gradient in the last backward pass: second.weight, second.bias"
            in text
        )
        assert marked_line(__file__, mark) in text
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in text
        assert "ddp_find_unused_parameters=True" in text
        assert "requires_grad_(False)" in text


@pytest.mark.parametrize("how", ["looks", "frozen"])
def test_unused_parameters_that_ddp_knows_of_are_no_error(how: str) -> None:
    batches = [MIXED, POSITIVE, MIXED]
    expected = _plain(batches, freezes=how == "frozen")
    for text, weights in run_on_ranks(_train_unused, batches, how, "ddp", world_size=2):
        assert text == ""
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)  # float64; equal batches on both ranks


def _train_by_trainer(folder: str, looks: bool) -> str:
    data = [{"x": -torch.ones(2, dtype=torch.float64), "labels": torch.zeros(1, dtype=torch.float64)}] * 8
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=looks,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Trainer(_HalfUsed(), arguments, train_dataset=data).train()
        except UsageError as error:
            return str(error)
    return ""


def test_the_trainer_names_unused_parameters(tmp_path: Path) -> None:
    for text in run_on_ranks(_train_by_trainer, str(tmp_path), False, world_size=2):
        assert "second.weight, second.bias" in text
    assert run_on_ranks(_train_by_trainer, str(tmp_path), True, world_size=2) == ["", ""]
