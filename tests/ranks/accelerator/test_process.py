"""Process control of the Accelerator and PartialState: properties, decorators, ordering, collectives, and accumulation windows."""

from __future__ import annotations

import json
import pickle
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from echelon import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    PartialState,
    skip_first_batches,
)
from echelon.base.errors import DesyncError
from echelon.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler, SkipDataLoader
from echelon.optimizer import AcceleratedOptimizer
from echelon.scheduler import AcceleratedScheduler
from tests.harness import RanksFailed, errors_on_ranks, run_on_ranks


def _facts(kind: str) -> list[Any]:
    state: Any = Accelerator() if kind == "Accelerator" else PartialState()

    def name() -> str:
        return "ran"

    return [
        (state.num_processes, state.process_index, state.local_process_index),
        (state.is_main_process, state.is_local_main_process, state.is_last_process),
        state.on_main_process(name)(),
        state.on_local_main_process(name)(),
        state.on_last_process(name)(),
        state.on_process(name, process_index=1)(),
        state.on_process(process_index=1)(name)(),
        state.on_local_process(name, local_process_index=1)(),
    ]


@pytest.mark.parametrize("kind", ["Accelerator", "PartialState"])
def test_each_function_runs_on_the_intended_ranks(kind: str) -> None:
    first, second = run_on_ranks(_facts, kind)
    assert first == [(2, 0, 0), (True, True, False), "ran", "ran", None, None, None, None]
    assert second == [(2, 1, 1), (False, False, True), None, None, "ran", "ran", "ran", "ran"]


def _every_part(kind: str) -> list[str]:
    state: Any = Accelerator() if kind == "Accelerator" else PartialState()
    ran: list[str] = []
    state.on_process(lambda: ran.append("rank 3"), process_index=3)()
    state.on_local_process(lambda: ran.append("local rank 3"), local_process_index=3)()
    return ran


@pytest.mark.parametrize("kind", ["Accelerator", "PartialState"])
def test_a_single_process_gets_every_part(kind: str) -> None:
    assert run_on_ranks(_every_part, kind, world_size=1) == [["rank 3", "local rank 3"]]


def _in_turn(kind: str, folder: str) -> list[Any]:
    state: Any = Accelerator() if kind == "Accelerator" else PartialState()
    found = []
    for number, turn in enumerate((state.main_process_first, state.local_main_process_first)):
        path = Path(folder, str(number))
        with turn():
            found.append(path.exists())
            if state.process_index == 0:
                time.sleep(0.05)  # the other rank would have arrived long before
                path.touch()
        state.wait_for_everyone()
    with state.split_between_processes([1, 2, 3]) as part, state.split_between_processes([1, 2, 3], True) as padded:
        found += [part, padded]
    state.print(f"rank {state.process_index} was here")
    return found


@pytest.mark.parametrize("kind", ["Accelerator", "PartialState"])
def test_the_main_process_goes_first_and_prints(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run_on_ranks(_in_turn, kind, str(tmp_path))
    assert first == [False, False, [1, 2], [1, 2]]
    assert second == [True, True, [3], [3, 3]]
    printed = capsys.readouterr().out
    assert "rank 0 was here" in printed
    assert "rank 1 was here" not in printed


def _together() -> dict[str, Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    flags = [accelerator.check_trigger()]
    if rank == 1:
        accelerator.set_trigger()
    flags += [accelerator.check_trigger(), accelerator.check_trigger()]
    mine = torch.tensor([float(rank + 1)])
    return {
        "flags": flags,
        "gather": accelerator.gather({"x": mine})["x"].tolist(),
        "sum": accelerator.reduce(
            mine
        ).item(),  # the default is "sum" here and "mean" in echelon.utils, like in accelerate
        "mean": accelerator.reduce(mine, reduction="mean", scale=10.0).item(),
        "padded": accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=7).tolist(),
    }


def test_collectives_combine_the_values_of_all_processes() -> None:
    first, second = run_on_ranks(_together)
    assert (first.pop("padded"), second.pop("padded")) == ([1.0, 7.0], [1.0, 1.0])
    assert first == second == {"flags": [False, True, False], "gather": [1.0, 2.0], "sum": 3.0, "mean": 15.0}


def _prepared(accelerator: Accelerator, *sizes: tuple[int, int]) -> tuple[Any, ...]:
    """Return a prepared weight of zero, its optimizer, and loaders of ones with (samples, batch size)."""
    inner = nn.Linear(1, 1, bias=False)
    inner.weight.data.fill_(0.0)
    loaders = [DataLoader(torch.ones(n, 1), batch_size=batch_size) for n, batch_size in sizes]  # type: ignore[arg-type]
    return accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=1.0), *loaders)


def _uneven_join() -> tuple[int, float]:
    accelerator = Accelerator()
    model, optimizer, loader = _prepared(accelerator, (6, 2))
    steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch).mean())
            optimizer.step()
            steps += 1
    assert accelerator.even_batches is True
    return steps, accelerator.unwrap_model(model).weight.item()


def test_processes_may_run_out_of_batches_on_the_cpu() -> None:
    # Three batches for two ranks. The gradient of w * 1 is 1; in step 2 rank 0 is alone, and DDP divides by both: -1.5.
    # accelerate does nothing on CPUs, and hangs.
    assert run_on_ranks(_uneven_join) == [(2, -1.5), (1, -1.5)]


def _short_window(joins: bool) -> None:
    # Three batches for two ranks: the window of 3 ends with the second batch of rank 0 and the first one of rank 1.
    options = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(dataloader_config=options, gradient_accumulation_steps=3)
    model, optimizer, loader = _prepared(accelerator, (8, 3))
    with accelerator.join_uneven_inputs([model]) if joins else nullcontext():
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not joins:
                accelerator.reduce(loss.detach())


@pytest.mark.parametrize("joins", [False, True])
def test_a_window_that_ends_on_only_one_rank_is_an_error(joins: bool) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_short_window, joins, timeout=15)
    error = failed.value.errors[1]
    assert isinstance(error, DesyncError)
    text = str(error)
    assert "the forward pass in step 1 of this pass: rank 1 has no more batches" in text
    assert "gradient_accumulation_steps=3" in text
    assert ("join_uneven_inputs" in text) is False


def _alone(num_steps: int, evaluates: bool) -> None:
    options = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(dataloader_config=options, gradient_accumulation_steps=num_steps)
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    model, loader = accelerator.prepare(model, DataLoader(torch.ones(2 * num_steps + 1, 1), batch_size=1))
    if evaluates:
        model.eval()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).mean()
            if not evaluates:
                accelerator.backward(loss)
    if evaluates:
        accelerator.wait_for_everyone()


@pytest.mark.parametrize("num_steps", [1, 3])
def test_rank_with_more_batches_fails_before_its_forward_pass(num_steps: int) -> None:
    # Torch's DDP forms its buckets anew in the forward pass after the first update: a collective.
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_alone, num_steps, False, timeout=15)
    assert f"the forward pass in step {num_steps + 1} of this pass would hang, because rank 1 ended" in str(
        failed.value.errors[0]
    )
    run_on_ranks(_alone, num_steps, True)  # nobody waits for an evaluation


def _two_together(own_first: bool, joins: bool) -> tuple[int, float]:
    # One batch for two ranks, read together with two batches: rank 1 gets none, although the other loader has one.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, optimizer, short, whole = _prepared(accelerator, (1, 1), (2, 1))
    steps = 0
    with accelerator.join_uneven_inputs([model]) if joins else nullcontext():
        for first, second in zip(short, whole) if own_first else zip(whole, short):
            accelerator.backward(model(first).mean() + second.mean())
            optimizer.step()
            steps += 1
    # A different collective, with which the reduction of rank 0 would be mismatched.
    accelerator.gather(torch.zeros(3))
    return steps, accelerator.unwrap_model(model).weight.item()


@pytest.mark.sample(1)
@pytest.mark.parametrize("own_first", [False, True])
def test_a_rank_without_a_batch_from_one_of_two_loaders_gets_an_error(own_first: bool) -> None:
    (text, *_) = errors_on_ranks(DesyncError, _two_together, own_first, False, timeout=15)
    assert "in step 1 of this pass would hang, because rank 1 ended after at most 0 batches" in text


def test_joining_ranks_may_read_two_loaders_together() -> None:
    # The gradient of w * 1 is 1, divided by both ranks; rank 1 takes over the model of rank 0.
    assert run_on_ranks(_two_together, True, True) == [(1, -0.5), (0, -0.5)]


def _left_in_its_last_batch() -> int:
    # Rank 1 has no second batch. The iterator that is held is no loop, and its pass, as that of the loop, has no say in what follows.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader, other = accelerator.prepare(DataLoader(torch.ones(3, 1), batch_size=1), DataLoader(torch.ones(2, 1)))
    held = iter(loader)
    next(held)
    for _ in loader:
        pass
    total = sum(len(accelerator.gather(batch)) for batch in other)
    held.close()  # type: ignore[attr-defined]
    return total


def test_a_finished_pass_does_not_affect_the_next_loop() -> None:
    assert run_on_ranks(_left_in_its_last_batch) == [2, 2]


def _whole_windows() -> tuple[int, float]:
    options = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(dataloader_config=options, gradient_accumulation_steps=2)
    model, optimizer, loader = _prepared(accelerator, (5, 1))
    steps = 0
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
    return steps, accelerator.unwrap_model(model).weight.item()


def test_a_rank_may_end_at_a_window_boundary_of_all_ranks() -> None:
    # The gradient of w * 1 is 1. In the second window rank 0 is alone: one batch for a window, divided by both ranks: -1.5.
    assert run_on_ranks(_whole_windows) == [(3, -1.5), (2, -1.5)]


def test_parts_are_prepared_one_by_one() -> None:
    accelerator = Accelerator()
    inner = nn.Linear(2, 1)
    sgd = torch.optim.SGD(inner.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    model = accelerator.prepare_model(inner)
    optimizer = accelerator.prepare_optimizer(sgd)
    scheduler = accelerator.prepare_scheduler(schedule)
    loader = accelerator.prepare_data_loader(DataLoader(torch.ones(4, 2), batch_size=2))
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(scheduler, AcceleratedScheduler)
    assert isinstance(loader, DataLoaderShard)
    assert isinstance(loader, DataLoader)
    rates = []
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr())
    assert rates == [[0.25], [0.125]]
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.defaults["momentum"] == 0.9
    assert set(optimizer.state) == set(inner.parameters())
    assert optimizer.step_was_skipped is False
    assert scheduler.state_dict()["last_epoch"] == scheduler.last_epoch == 2
    assert (scheduler.base_lrs, scheduler.optimizer, scheduler.get_lr.__self__) == ([0.5], sgd, schedule)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 7})
    assert schedule.last_epoch == 7
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.75
    optimizer.load_state_dict(state)
    assert sgd.param_groups[0]["lr"] == 0.75
    assert (accelerator._models, accelerator._dataloaders) == ([model], [loader])
    assert (accelerator._optimizers, accelerator._schedulers) == ([optimizer], [scheduler])
    assert accelerator.unwrap_model(model) is inner
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.state_dict()["param_groups"] == sgd.state_dict()["param_groups"]
    extra = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra]})
    assert sgd.param_groups[1]["params"] == [extra]
    for give_back in (accelerator.free_memory, accelerator.clear):
        accelerator.step = 3
        assert give_back(model, optimizer) == [None, None]
        assert (accelerator._models, accelerator._optimizers, accelerator.step) == ([], [], 0)


class _ScheduleFree(torch.optim.SGD):
    mode = "train"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_a_schedule_free_optimizer_switches_between_train_and_eval() -> None:
    parameters = list(nn.Linear(1, 1).parameters())
    inner = _ScheduleFree(parameters, lr=0.1)
    optimizer, plain = Accelerator().prepare(inner, torch.optim.SGD(parameters, lr=0.1))
    modes = []
    for switch in (optimizer.eval, optimizer.train):
        switch()
        modes.append(inner.mode)
    assert modes == ["eval", "train"]
    assert (plain.eval(), plain.train()) == (None, None)  # other optimizers have no modes


class _Count(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(4))


def _kinds_of_loaders() -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    dispatched = accelerator.prepare(DataLoader(_Count(), batch_size=1))
    return [isinstance(dispatched, DataLoaderDispatcher), [batch.tolist() for batch in dispatched]]


def test_each_kind_of_loader_reads_the_expected_samples() -> None:
    assert run_on_ranks(_kinds_of_loaders) == [[True, [[0], [2]]], [True, [[1], [3]]]]
    sampler = torch.utils.data.BatchSampler(range(7), 2, False)
    skipping = SkipBatchSampler(sampler, skip_batches=2)
    assert (list(skipping), len(skipping), skipping.total_length) == ([[4, 5], [6]], 2, 4)
    assert [b.tolist() for b in SkipDataLoader(torch.arange(5), skip_batches=1, batch_size=2)] == [[2, 3], [4]]
    rest = skip_first_batches(DataLoader(torch.arange(5), batch_size=2), num_batches=2)
    assert [batch.tolist() for batch in rest] == [[4]]


def _gradients(scaled: bool) -> list[float]:
    accelerator = Accelerator(
        mixed_precision="fp16" if scaled else "no", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]
    )
    inner = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=1.0))
    assert (accelerator.scaler is not None) == scaled
    accelerator.backward(model(torch.tensor([[3.0]])).sum())
    raw = inner.weight.grad.item()
    accelerator.unscale_gradients(optimizer)
    seen = [raw, inner.weight.grad.item()]
    accelerator.clip_grad_value_(inner.parameters(), 2.0)
    return [*seen, inner.weight.grad.item()]


def test_gradients_are_unscaled_once_and_clipped_by_value() -> None:
    assert _gradients(scaled=False) == [3.0, 3.0, 2.0]
    assert _gradients(scaled=True) == [24.0, 3.0, 2.0]


def test_the_window_has_accelerates_attribute_names() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False, sync_with_dataloader=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    state = accelerator.gradient_state
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (2, False, True)
    assert state.plugin_kwargs["num_steps"] == accelerator.gradient_accumulation_steps == 2
    assert (state.in_dataloader, state.active_dataloader, state.dataloader_references) == (False, None, [None])
    assert (state.remainder, state.is_xla_gradients_synced) == (-1, False)
    model = accelerator.prepare(nn.Linear(1, 1))
    loader = accelerator.prepare(DataLoader(torch.ones(3, 1), batch_size=1))
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            seen.append((accelerator.step, accelerator.sync_gradients, state.end_of_dataloader))
            assert state.dataloader_references == [None, loader]
    assert seen == [(1, False, False), (2, True, False), (0, True, True)]  # the last window is shorter
    accelerator.gradient_accumulation_steps = 4
    assert state.num_steps == 4
    accelerator.sync_gradients = False
    assert state.sync_gradients is False


def _schedule(with_optimizer: bool, steps: int) -> list[float]:
    accelerator = Accelerator(step_scheduler_with_optimizer=with_optimizer, gradient_accumulation_steps=steps)
    inner = nn.Linear(1, 1)
    sgd = torch.optim.SGD(inner.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(inner, sgd, schedule)
    rates = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            rates.append(round(1 / scheduler.get_last_lr()[0]))
    return rates


def test_schedules_follow_the_optimizer_or_explicit_calls() -> None:
    # Two ranks: two steps of the schedule in an update (calls 2 and 4 where two are accumulated), or one in every call.
    assert run_on_ranks(_schedule, True, 2)[1] == [1, 3, 3, 5]
    assert run_on_ranks(_schedule, True, 1)[1] == [3, 5, 7, 9]
    assert run_on_ranks(_schedule, False, 1)[1] == [2, 3, 4, 5]


def _track(folder: str) -> bool:
    accelerator = Accelerator(log_with=[], project_dir=folder)
    accelerator.init_trackers("run", config={"lr": 0.5})
    accelerator.log({"loss": 0.25 + accelerator.process_index}, step=3)
    accelerator.end_training()
    return dist.is_initialized()


def test_logged_values_are_in_a_file_of_the_main_process(tmp_path: Path) -> None:
    assert run_on_ranks(_track, str(tmp_path), init_group=False) == [False, False]
    (path,) = tmp_path.rglob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["values"]) for line in lines if line["kind"] == "metrics"] == [(3, {"loss": 0.25})]


def test_two_accelerators_have_separate_settings_and_windows() -> None:
    first = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    second = Accelerator()
    model, other = first.prepare(nn.Linear(1, 1)), second.prepare(nn.Linear(1, 1))
    flags = []
    for _ in range(4):
        with first.accumulate(model):
            first.backward(model(torch.ones(1, 1)).sum())
        with second.accumulate(other):
            second.backward(other(torch.ones(1, 1)).sum())
        flags.append((first.sync_gradients, second.sync_gradients))
    assert flags == [(False, True)] * 3 + [(True, True)]
    # In accelerate, the second Accelerator resets the first one's steps to 1 and its precision to "no".
    assert (first.gradient_accumulation_steps, first.mixed_precision) == (4, "bf16")
    assert model.weight.grad.item() == 1.0  # the mean of four
    assert other.weight.grad.item() == 4.0  # four updates without zero_grad
    first.free_memory()
    assert second._models == [other]
