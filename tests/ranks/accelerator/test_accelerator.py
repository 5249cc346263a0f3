"""The Accelerator against plain PyTorch; and each bad input to it: its own error that says what, where and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from echelon import Accelerator, AutocastKwargs, DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from echelon.base import environ
from echelon.base.errors import ConfigError, DesyncError, EchelonError, UsageError
from echelon.distributed import shard
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import marked_lines
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain


def _small() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    set_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = TensorDataset(torch.randn(100, 10), torch.randint(0, 2, (100,)))
    return model, optimizer, scheduler, DataLoader(data, batch_size=8, shuffle=True)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_process_follows_a_plain_loop_bit_for_bit(accumulation: int) -> None:
    model, optimizer, scheduler, loader = _small()
    expected = []
    for _ in range(4):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            expected.append(loss.detach())
            loss = loss * (1 / accumulation) if accumulation > 1 else loss
            loss.backward()
            if (i + 1) % accumulation == 0 or i + 1 == len(loader):
                length = i % accumulation + 1
                if length < accumulation:  # the last window of an epoch is divided by its own length
                    for p in model.parameters():
                        p.grad *= accumulation / length
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]

    model, optimizer, scheduler, loader = _small()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    seen = []
    for _ in range(4):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                seen.append(loss.detach())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert len(seen) >= 50
    assert torch.equal(torch.stack(seen), torch.stack(expected))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))


_TOKENS = {"num_samples": 53, "collate": "padded", "loss": "items"}  # 53 = 6 * 8 + 5; some samples have no tokens
_PROGRAMS = [
    *(
        Program(
            **_TOKENS, batch_size=8, accumulation=accumulation, clipping="norm", optimizer=optimizer, split_batches=True
        )
        for accumulation in (1, 3)
        for optimizer in ("momentum", "adamw")
    ),
    *(Program(**_TOKENS, batch_size=size, accumulation=size) for size in (1, 2, 3)),
    *(Program(num_samples=13, batch_size=2, accumulation=accumulation, loss="two") for accumulation in (1, 2)),
    *(
        Program(num_samples=14, batch_size=2, accumulation=3, guards=True, clears_first=first)
        for first in (True, False)
    ),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_update_equals_that_of_one_large_batch(world_size: int) -> None:
    """Whatever the numbers of tokens and losses, and where ``zero_grad`` stands beside ``accumulate`` and ``backward``."""
    require_plain([Case(program=program, layout=Layout(world_size=world_size)) for program in _PROGRAMS])


def test_scaling_the_item_counts_does_not_change_the_bits() -> None:
    """Items of 3 and of 3 * 1024 give the same gradients: the scale between them is a power of two."""
    results = []
    for factor in (1, 1024):
        torch.manual_seed(4)
        model = nn.Linear(4, 2)
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(model)
        for x in torch.randn(2, 3, 4):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean(), num_items=3 * factor)
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def _raised(function: Any, *args: Any, world_size: int = 2) -> EchelonError:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(function, *args, world_size=world_size)
    assert sorted(failed.value.errors) == list(range(world_size))  # on every rank, not a hang of the others
    error = failed.value.errors[0]
    assert isinstance(error, EchelonError)
    assert error.do
    return error


def _split_odd() -> None:
    Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)).prepare(
        DataLoader(torch.arange(10), batch_size=5)  # type: ignore[arg-type]
    )


def test_an_indivisible_batch_is_an_error() -> None:
    error = _raised(_split_odd)
    assert isinstance(error, UsageError)
    assert "but got batch_size=5" in str(error)
    assert "multiple of 2" in str(error)


def _forgotten_loader(how: str) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    train_loader: Any = DataLoader(torch.arange(8.0)[:, None], batch_size=4)  # type: ignore[arg-type]
    if how == "sharded by Level 1":
        train_loader = shard(train_loader)
    elif how == "allowed":
        accelerator.allow_unsharded(train_loader)
    elif how == "prepared":
        train_loader = accelerator.prepare(train_loader)
    elif how == "distributed sampler":
        sampler = torch.utils.data.DistributedSampler(range(8))  # type: ignore[arg-type]
        train_loader = DataLoader(torch.arange(8.0)[:, None], batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    elif how == "read before":
        assert len(list(train_loader)) == 2
        train_loader = [torch.full((4, 1), float(accelerator.process_index))]
    elif how == "held":
        train_loader = {"train": [tqdm(train_loader, disable=True)]}["train"][0]
    elif how == "without a name":
        del train_loader
        for x in DataLoader(torch.arange(8.0)[:, None], batch_size=4):  # type: ignore[arg-type] # ITERATED
            accelerator.backward(model(x).mean())
        return
    for x in train_loader:  # ITERATED
        accelerator.backward(model(x).mean())


@pytest.mark.parametrize("how", ["in a variable", "held", "without a name"])
def test_an_unprepared_loader_is_reported(how: str) -> None:
    error = _raised(_forgotten_loader, how)
    assert isinstance(error, UsageError)
    assert "was not prepared, so every process would train on the same samples" in str(error)
    assert "loader = accelerator.prepare(loader)" in str(error)
    assert any(f"/{line} was not prepared" in str(error) for line in marked_lines(__file__, "ITERATED"))


@pytest.mark.parametrize("how", ["sharded by Level 1", "allowed", "prepared", "distributed sampler", "read before"])
def test_correct_loaders_are_not_reported(how: str) -> None:
    run_on_ranks(_forgotten_loader, how, world_size=2)


def test_one_process_may_use_any_loader() -> None:
    run_on_ranks(_forgotten_loader, "in a variable", world_size=1)


def _unequal_gather() -> None:
    Accelerator().gather(torch.zeros(dist.get_rank() + 1))


def test_unequal_shapes_are_listed_for_each_rank() -> None:
    error = _raised(_unequal_gather)
    assert isinstance(error, DesyncError)
    assert "rank 0: gather float32[1]" in str(error)
    assert "rank 1: gather float32[2]" in str(error)
    assert "pad_across_processes" in str(error)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (torch.zeros(3, requires_grad=True) * 2, "scalar loss, but got a tensor of shape [3]"),
        (0.5, "expects a tensor, but got float"),
        ({"loss": torch.zeros(())}, "expects a tensor, but got dict"),
        (torch.zeros(()), "a loss that does not require grad"),
    ],
)
def test_backward_rejects_invalid_losses(loss: Any, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        Accelerator().backward(loss)
    assert text in str(raised.value)
    assert raised.value.do


def test_backward_accepts_a_non_scalar_with_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    Accelerator().backward(x * 2, gradient=torch.tensor([1.0, 2.0, 3.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0, 6.0]
    leaf = torch.ones((), requires_grad=True)
    Accelerator().backward(leaf)
    assert leaf.grad is not None


@pytest.mark.parametrize("arguments", [(), (3, "x"), ([], {})])
def test_prepare_without_known_objects_is_an_error(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="got no object that it can prepare"):
        Accelerator().prepare(*arguments)


def test_device_placement_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(UsageError, match="device_placement has 2 entries for 1 arguments"):
        Accelerator().prepare(nn.Linear(1, 1), device_placement=[True, False])


@pytest.mark.parametrize("items", [-1, float("nan"), float("inf")])
def test_invalid_num_items_is_an_error(items: float) -> None:
    with pytest.raises(UsageError, match="is not a valid number of items"):
        Accelerator().backward(torch.ones((), requires_grad=True) * 2, num_items=items)


def test_contradictory_weights_are_an_error() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loss = torch.ones((), requires_grad=True)
    with accelerator.accumulate():
        accelerator.backward(loss * 2, num_items=3)
        with pytest.raises(UsageError, match="num_items=4 after num_items=3 in the same micro-step"):
            accelerator.backward(loss * 2, num_items=4)
        with pytest.raises(UsageError, match="mixes losses with num_items= and losses without"):
            accelerator.backward(loss * 2)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"mixed_precision": "fp61"}, ["mixed_precision='fp61'", "one of no, fp16, bf16, fp8", "Accelerator("]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps=0 is below 1"]),
        ({"engine": "fdsp2"}, ["unknown engine 'fdsp2'"]),
        ({"torch_tp_plugin": object()}, ["Accelerator(torch_tp_plugin=) is not supported"]),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ["two AutocastKwargs"]),
        ({"kwargs_handlers": [object()]}, ["contains a object"]),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
            ["are both set"],
        ),
    ],
)
def test_invalid_settings_are_errors(arguments: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        Accelerator(**arguments)
    assert all(text in str(raised.value) for text in texts)
    assert raised.value.do


def test_code_overrides_the_environment_with_a_message() -> None:
    with environ.patch({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8", "ACCELERATE_MIXED_PRECISION": "bf16"}):
        accelerator = Accelerator(gradient_accumulation_steps=2)
    assert accelerator.gradient_accumulation_steps == 2
    assert accelerator.mixed_precision == "bf16"
    assert [(s.name, s.value, str(s.origin)) for s in accelerator.config.shadowed] == [
        ("gradient_accumulation_steps", 8, "env ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    ]


def test_prepare_keeps_order_nesting_and_unknown_objects() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator = Accelerator()
    text, pair, table, step = accelerator.prepare("text", (optimizer, [model]), {"other": other, 3: None}, scheduler)
    assert text == "text"
    assert pair[0].optimizer is optimizer
    assert pair[1] == [model]
    assert table == {"other": other, 3: None}
    assert step.scheduler is scheduler
    assert accelerator.prepare(model) is model
    assert accelerator.prepare(optimizer) is pair[0]
    assert accelerator.prepare(pair[0]) is pair[0]
    assert (len(accelerator._models), len(accelerator._optimizers), len(accelerator._schedulers)) == (2, 1, 1)
    assert isinstance(pair[0], torch.optim.Optimizer)
    assert pair[0].param_groups[0]["lr"] == 0.1
