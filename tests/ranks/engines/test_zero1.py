"""zero1: bit-identical to ddp, with the optimizer state sharded over the ranks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from echelon import Accelerator, GradScalerKwargs
from echelon.base.errors import UsageError
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import train_prepared, weights_of


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]


def _batches(number: int) -> list[torch.Tensor]:
    """Return batches of this rank, of other sizes than those of the other ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    return [torch.randn(2 + dist.get_rank() + i % 2, 5, generator=generator) for i in range(number)]


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# ---- bit-equal to ddp ------------------------------------------------------------------------------------------------


def _twenty_steps(engine: str) -> list[torch.Tensor]:
    accelerator = Accelerator(engine=engine, gradient_accumulation_steps=2)
    model = _model()
    optimizer = torch.optim.AdamW(_groups(model), lr=0.05)
    scheduler = lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(optimizer, 60)],
        milestones=[10],
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_prepared(accelerator, model, optimizer, _batches(40), schedule=scheduler, max_norm=0.1, counts_items=True)
    assert scheduler.get_last_lr()[0] < 0.05
    return weights_of(accelerator, model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_twenty_adamw_steps_match_ddp_bit_for_bit(world_size: int) -> None:
    """Accumulation, clipping, num_items, a schedule, groups."""
    expected = run_on_ranks(_twenty_steps, "ddp", world_size=world_size)[0]
    for weights in run_on_ranks(_twenty_steps, "zero1", world_size=world_size):
        assert all(map(torch.equal, weights, expected))
    assert not all(map(torch.equal, expected, _weights(_model())))


class _Warming(torch.optim.SGD):
    """A user's optimizer: what its constructor was given is in no group, and it does not say how to make another."""

    def __init__(self, params: Any, boost: float) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.boost = boost

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= self.boost
        super().step(closure)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "named": lambda p: torch.optim.AdamW([(f"p{i}", q) for i, q in enumerate(p)]),
    "warming": lambda p: _Warming(p, boost=1.5),
}


def _each_kind(engine: str) -> dict[str, list[torch.Tensor]]:
    """Two steps before prepare, whose state is kept; three after it."""
    found = {}
    for name, make in _KINDS.items():
        model = _model()
        optimizer = make(list(model.parameters()))
        for _ in range(2):
            model(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        accelerator = Accelerator(engine=engine)
        prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
        batches = _batches(3)
        train_prepared(accelerator, prepared, prepared_optimizer, batches)
        optimizer.param_groups[0]["lr"] *= 0.0  # as scripts do that keep the object that they made
        train_prepared(accelerator, prepared, prepared_optimizer, batches[-1:])
        found[name] = _weights(model)
    return found


@pytest.mark.slow
def test_every_torch_optimizer_and_a_custom_one_match_ddp() -> None:
    expected = run_on_ranks(_each_kind, "ddp")[0]
    for found in run_on_ranks(_each_kind, "zero1"):
        assert [name for name in _KINDS if not all(map(torch.equal, found[name], expected[name]))] == []


def _scheduled(engine: str) -> list[list[float]]:
    """Schedules of several kinds, one prepared after its optimizer; pytest makes an error of torch's warnings."""
    seen = []
    for make in (
        lambda o: lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.5), lr_scheduler.ConstantLR(o)]),
    ):
        accelerator = Accelerator(engine=engine)
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = accelerator.prepare(scheduler)
        rates = []
        for x in _batches(3):
            train_prepared(accelerator, model, optimizer, [x], schedule=scheduler)
            rates.append(optimizer.param_groups[0]["lr"])
        seen.append([*rates, *(p.sum().item() for p in model.parameters())])
    return seen


def test_schedules_drive_the_new_optimizer() -> None:
    assert run_on_ranks(_scheduled, "zero1") == run_on_ranks(_scheduled, "ddp")


# ---- state -----------------------------------------------------------------------------------------------------------


def _trained(engine: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(engine=engine)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(_groups(model), lr=0.05))
    train_prepared(accelerator, model, optimizer, _batches(4), max_norm=0.1, counts_items=True)
    return accelerator, model, optimizer


def _refuse(*_args: Any, **_kwargs: Any) -> None:
    raise AssertionError("something was unpickled")


def _whole_state(engine: str) -> tuple[Any, list[torch.Tensor], int]:
    accelerator, model, optimizer = _trained(engine)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((torch, "load"), (pickle, "loads"), (pickle, "load"), (pickle, "Unpickler")):
            patch.setattr(module, name, _refuse)
        state = accelerator.session.engine.full_optimizer_state(optimizer.optimizer)
    kept = sum(len(values) for values in optimizer.state.values())
    return state, weights_of(accelerator, model), kept


def _go_on(engine: str, state: Any, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    accelerator = Accelerator(engine=engine)
    model = _model()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights):
            parameter.copy_(value)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(_groups(model), lr=0.3))
    groups = optimizer.param_groups
    accelerator.session.engine.load_full_optimizer_state(optimizer.optimizer, state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]
    assert engine != "zero1" or optimizer.param_groups is groups  # who holds them still sets them
    train_prepared(accelerator, model, optimizer, _batches(3), max_norm=0.1, counts_items=True)
    return weights_of(accelerator, model)


def test_the_full_state_moves_between_ddp_and_other_numbers_of_ranks() -> None:
    (state, weights, kept), *others = run_on_ranks(_whole_state, "zero1")
    (expected, _, whole), *_ = run_on_ranks(_whole_state, "ddp")
    assert [other[0] for other in others] == [None]
    assert kept + others[0][2] == whole == 3 * 6
    assert 0 < kept < whole
    assert state["param_groups"] == expected["param_groups"]
    assert list(state["state"]) == list(expected["state"]) == list(range(6))
    for mine, theirs in zip(state["state"].values(), expected["state"].values()):
        assert list(mine) == list(theirs)
        assert all(map(torch.equal, mine.values(), theirs.values()))
    for world_size in (2, 3):
        after = [run_on_ranks(_go_on, e, state, weights, world_size=world_size) for e in ("ddp", "zero1")]
        assert all(all(map(torch.equal, one, after[0][0])) for ranks in after for one in ranks)


# ---- uneven ends -----------------------------------------------------------------------------------------------------


def _uneven(engine: str, precision: str | None, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rank r trains r + 1 windows inside join; then all train on together."""
    accelerator = Accelerator(
        engine=engine,
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
    )
    model = _model()
    optimizer = torch.optim.AdamW(_groups(model), lr=0.05)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.7)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def train(number: int) -> None:
        for i, x in enumerate(_batches(number)):
            with accelerator.accumulate(model):
                # The last rank's third window is left out in fp16, where others have ended.
                loss = model(x).square().mean() * (float("inf") if precision and i == 2 * steps else 1.0)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if i == 0:
                with torch.no_grad():
                    model(x)  # a look at the model takes part, too

    with accelerator.join_uneven_inputs([model]):
        train(steps * (2 * dist.get_rank() + 1))
    after = weights_of(accelerator, model)
    train(2 * steps)
    return after, weights_of(accelerator, model)


@pytest.mark.parametrize(("precision", "steps", "world_size"), [(None, 1, 3), (None, 2, 2), ("fp16", 1, 2)])
def test_ended_ranks_step_their_part_with_the_running_ranks(precision: str | None, steps: int, world_size: int) -> None:
    expected = run_on_ranks(_uneven, "ddp", precision, steps, world_size=world_size)[0][0]
    results = run_on_ranks(_uneven, "zero1", precision, steps, world_size=world_size)
    for after, later in results:
        assert all(map(torch.equal, after, expected))
        assert all(map(torch.equal, later, results[0][1]))


# ---- what cannot be ---------------------------------------------------------------------------------------------------


class _Averaging(torch.optim.SGD):
    def eval(self) -> None:
        """As schedule-free optimizers, which put other weights in."""


class _Outer(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)


def _refusals() -> list[str]:
    texts = []
    replaced = torch.optim.SGD(_model().parameters(), lr=0.1)
    replaced.step = lambda *_: None  # type: ignore[method-assign]
    lbfgs = torch.optim.LBFGS(_model().parameters())
    others = [_Averaging(_model().parameters(), lr=0.1), _Outer(_model().parameters()), replaced]
    for optimizer in [lbfgs, *others]:
        with pytest.raises(UsageError, match="cannot be sharded") as caught:
            Accelerator(engine="zero1").prepare(optimizer)
        texts.append(str(caught.value))
    accelerator, model, optimizer = _trained("zero1")
    with pytest.raises(UsageError, match="of only some parameters") as caught:
        optimizer.state_dict()
    texts.append(str(caught.value))
    with accelerator.no_sync(model, unsynced=True), pytest.raises(UsageError, match="one rank's gradients") as caught:
        optimizer.step()
    texts.append(str(caught.value))
    larger = torch.optim.SGD([*_model().parameters(), nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    sum(p.sum() for p in larger.param_groups[0]["params"]).backward()
    larger.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(larger.state_dict())
    return texts


def test_optimizers_that_cannot_be_sharded_are_rejected_with_a_remedy() -> None:
    for texts in run_on_ranks(_refusals):
        assert all("do:" in text for text in texts), texts
        for text, reason in zip(texts, ["'_params'", "eval()", "'base'", "its step method was replaced"]):
            assert reason in text


def _strange_state() -> None:
    _, _, optimizer = _trained("zero1")
    for values in optimizer.state.values():
        values["strange"] = object()
    optimizer.full_state_dict()


def test_the_error_for_state_that_is_not_plain_data_names_it() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_strange_state)
    assert "contains a object, which cannot be sent" in str(caught.value.errors[0])


def _group_added(engine: str) -> list[torch.Tensor]:
    accelerator = Accelerator(engine=engine)
    model = _model()
    optimizer = torch.optim.AdamW(list(model.parameters())[:2], lr=0.1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))  # before prepare
    model, optimizer = accelerator.prepare(model, optimizer)
    optimizer.add_param_group({"params": list(model.parameters())[2:], "lr": 0.01})
    train_prepared(accelerator, model, optimizer, _batches(3))
    assert len(calls) == 3
    return _weights(model)


def test_groups_may_be_added_later_and_hooks_keep_working() -> None:
    expected = run_on_ranks(_group_added, "ddp")[0]
    assert all(all(map(torch.equal, weights, expected)) for weights in run_on_ranks(_group_added, "zero1"))


def test_an_unpickled_accelerator_has_no_prepared_objects() -> None:
    assert run_on_ranks(_pickled, world_size=1) == ["zero1"]


def _pickled() -> str:
    accelerator, _, _ = _trained("zero1")
    copy = pickle.loads(pickle.dumps(accelerator.session.engine))
    assert json.dumps(list(copy._sharded)) == "[]"
    name: str = copy.capabilities.name
    return name
