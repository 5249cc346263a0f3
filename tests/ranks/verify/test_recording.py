"""Recorded gradients, clipping, steps, weights and states of raw DDP and of the engines, against plain PyTorch in one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon import Accelerator
from echelon.distributed.checks.sketch import Sketch, sketch_of
from echelon.parallelism_config import ParallelismConfig
from echelon.verify.compare import compare
from echelon.verify.parts import record_everything
from echelon.verify.recording import recording
from echelon.verify.trace import (
    Clip,
    OptimizerStep,
    RecordingSettings,
    SketchedTensors,
    Trace,
    read_trace,
)
from tests.harness import run_on_ranks

LR, BETA, MAX_NORM, BATCH, UPDATES = 0.1, 0.9, 0.02, 4, 2


class Net(nn.Module):
    """Sizes that two and four ranks do not divide evenly; one tied weight, one unused parameter, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.third = nn.Linear(5, 5)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.frozen(self.first(x))))))


def _net() -> Net:
    torch.manual_seed(7)
    return Net()


def _batch(update: int, micro_step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * update + 10 * micro_step + rank)
    return torch.randn(BATCH, 6, generator=generator)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=BETA)


def _raw_ddp(micro_steps: int) -> None:
    model = DistributedDataParallel(_net(), find_unused_parameters=True)
    optimizer = _optimizer(model)
    for update in range(UPDATES + 1):
        optimizer.zero_grad()
        for micro_step in range(micro_steps):
            with nullcontext() if micro_step == micro_steps - 1 else model.no_sync():
                (_loss(model(_batch(update, micro_step, dist.get_rank()))) / micro_steps).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def _accelerator(micro_steps: int, engine: str, settings: dict[str, Any]) -> None:
    if engine != "fsdp2":
        from echelon.utils import DistributedDataParallelKwargs

        settings = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)], **settings}
    accelerator = Accelerator(engine=engine, gradient_accumulation_steps=micro_steps, **settings)
    model = _net()
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    for update in range(UPDATES + 1):
        for micro_step in range(micro_steps):
            with accelerator.accumulate(model):
                accelerator.backward(
                    _loss(model(_batch(update, micro_step, dist.get_rank() if dist.is_initialized() else 0)))
                )
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()


def _record(folder: str, kind: str, micro_steps: int, settings: dict[str, Any]) -> None:
    with recording(Path(folder), RecordingSettings(steps=UPDATES), rank=dist.get_rank()) as one:
        record_everything(one)
        if kind == "raw":
            _raw_ddp(micro_steps)
        else:
            _accelerator(micro_steps, kind, settings)


class Plain:
    """The same training in one process, with the gradient of each rank and micro-step apart."""

    def __init__(self, world_size: int, micro_steps: int) -> None:
        model = _net()
        optimizer = _optimizer(model)
        self.local: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}
        self.reduced: list[dict[str, torch.Tensor]] = []
        self.clipped: list[dict[str, torch.Tensor]] = []
        self.norms: list[float] = []
        self.weights = [copy.deepcopy(dict(model.named_parameters()))]
        self.momenta: list[dict[str, torch.Tensor]] = []
        for update in range(UPDATES):
            total: dict[str, torch.Tensor] = {}
            for micro_step in range(micro_steps):
                for rank in range(world_size):
                    model.zero_grad()
                    (_loss(model(_batch(update, micro_step, rank))) / micro_steps).backward()
                    own = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
                    self.local[update, micro_step, rank] = own
                    total = {n: total.get(n, 0) + g / world_size for n, g in own.items()}
            self.reduced.append(total)
            for name, parameter in model.named_parameters():
                parameter.grad = total[name].clone() if name in total else None
            self.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            self.clipped.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            self.weights.append(copy.deepcopy(dict(model.named_parameters())))
            self.momenta.append(
                {
                    n: optimizer.state[p]["momentum_buffer"].clone()
                    for n, p in model.named_parameters()
                    if p in optimizer.state
                }
            )


def _sketches(trace: Trace, rank: int | None = None, **where: Any) -> dict[str, Sketch]:
    """Return the sketches of one rank's events, or (rank None) the whole tensors: shards added, replicas compared."""
    found: dict[str, Sketch] = {}
    replicas: dict[tuple[int, str], Sketch] = {}  # under hybrid sharding: of the other replicas
    for number, events in enumerate(trace.ranks):
        if rank not in (None, number):
            continue
        for event in events:
            if not isinstance(event, SketchedTensors) or any(getattr(event, n) != v for n, v in where.items()):
                continue
            for name, sketch in zip(event.names, event.sketches, strict=True):
                if event.replica:
                    key = (event.replica, name)
                    replicas[key] = replicas[key] + sketch if key in replicas else sketch
                elif name in found and event.is_sharded:
                    found[name] = found[name] + sketch
                elif name in found and not name.startswith(
                    "buffer"
                ):  # of BatchNorm: each rank has its own until the next pass
                    assert found[name].bits == sketch.bits, (name, where)
                else:
                    found.setdefault(name, sketch)
    for (_, name), sketch in replicas.items():
        assert (sketch.bits, sketch.num_elements) == (found[name].bits, found[name].num_elements), (name, where)
    return found


def _assert_close(
    found: dict[str, Sketch], expected: dict[str, torch.Tensor], *, zeros: set[str] = frozenset()
) -> None:
    found = {name.removeprefix("0:"): sketch for name, sketch in found.items()}
    assert set(found) - zeros == set(expected)
    for name in zeros & set(found):
        assert found[name].square_sum == 0
    for name, tensor in expected.items():
        sketch = found[name]
        assert sketch.num_elements == tensor.numel(), name
        # float32 gradients of two layers: sums of at most 40 products; another order of summation.
        assert sketch.distance(sketch_of(tensor)) <= 1e-6 * (1 + float(tensor.detach().norm())), name


CASES = [
    ("raw", 2, 1, {}),
    ("raw", 2, 3, {}),
    ("raw", 4, 2, {}),
    ("ddp", 2, 2, {}),
    ("ddp", 1, 2, {}),
    ("zero1", 2, 2, {}),
    ("fsdp2", 1, 1, {}),
    ("fsdp2", 2, 1, {}),
    ("fsdp2", 2, 3, {}),
    ("fsdp2", 4, 2, {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "world_size", "micro_steps", "settings"), CASES)
def test_what_is_recorded_is_what_plain_pytorch_computes(
    kind: str, world_size: int, micro_steps: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    run_on_ranks(_record, str(tmp_path), kind, micro_steps, settings, world_size=world_size)
    trace, plain = read_trace(tmp_path), Plain(world_size, micro_steps)
    assert len(trace.ranks) == world_size
    weights = {n: p.detach() for n, p in plain.weights[0].items()}
    _assert_close(_sketches(trace, content="weights", update=-1), weights)
    for update in range(UPDATES):
        for rank in range(world_size):
            for micro_step in range(micro_steps):
                local = _sketches(trace, rank, content="local", update=update, micro_step=micro_step)
                _assert_close(local, plain.local[update, micro_step, rank])
        unused = {"unused"}  # engines may leave zeros where no gradient is
        _assert_close(_sketches(trace, content="reduced", update=update), plain.reduced[update], zeros=unused)
        _assert_close(_sketches(trace, content="clipped", update=update), plain.clipped[update], zeros=unused)
        trained = plain.weights[update + 1]  # the frozen ones, too, because they are few
        _assert_close(_sketches(trace, content="weights", update=update), trained)
        momenta = {f"{n}/momentum_buffer": m for n, m in plain.momenta[update].items()}
        _assert_close(
            _sketches(trace, content="optimizer_state", update=update), momenta, zeros={"unused/momentum_buffer"}
        )
        for events in trace.ranks:
            (clip,) = [one for one in events if isinstance(one, Clip) and one.update == update]
            assert clip.norm == pytest.approx(plain.norms[update], rel=1e-5)
            assert clip.max_norm == MAX_NORM
            assert Path(clip.line.split(":")[0]).name == Path(__file__).name
            (step,) = [one for one in events if isinstance(one, OptimizerStep) and one.update == update]
            assert (step.lrs, step.is_skipped) == ([LR], False)
            assert step.settings[0]["momentum"] == BETA
    assert max(one.update for events in trace.ranks for one in events if isinstance(one, OptimizerStep)) == UPDATES - 1


def _save_and_load(folder: str, engine: str) -> None:
    for is_resumed in (False, True):
        with recording(
            Path(folder, "resumed" if is_resumed else "first"),
            RecordingSettings(steps=1 if is_resumed else 2, first_update=int(is_resumed)),
            rank=dist.get_rank(),
        ) as one:
            record_everything(one)
            accelerator = Accelerator(engine=engine)
            torch.manual_seed(is_resumed)
            model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
            optimizer = torch.optim.Adam(model.parameters(), lr=LR)
            model, optimizer = accelerator.prepare(model, optimizer)
            if is_resumed:
                accelerator.load_state(f"{folder}/checkpoint")
            for update in range(is_resumed, 4):
                accelerator.backward(_loss(model(_batch(update, 0, dist.get_rank()))))
                optimizer.step()
                optimizer.zero_grad()
                if update == 0:
                    accelerator.save_state(f"{folder}/checkpoint")


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["zero1", "fsdp2"])
def test_the_state_that_is_saved_is_the_state_that_is_loaded(engine: str, tmp_path: Path) -> None:
    run_on_ranks(_save_and_load, str(tmp_path), engine)
    first, resumed = read_trace(tmp_path / "first"), read_trace(tmp_path / "resumed")
    saved, loaded = (
        _sketches(trace, content=content, update=0, path=str(tmp_path / "checkpoint"))
        for trace, content in ((first, "saved"), (resumed, "loaded"))
    )
    names = {"0:0.weight", "0:2.bias/exp_avg", "0:0.bias/step", "buffer 0:1.num_batches_tracked", "lr 0"}
    assert names <= set(saved)
    # Of the statistics of BatchNorm, which differ between ranks, those of rank zero are saved.
    assert {n: s.bits for n, s in saved.items()} == {n: s.bits for n, s in loaded.items()}
    weights, states = (
        _sketches(first, content="weights", update=0),
        _sketches(first, content="optimizer_state", update=0),
    )
    assert {n: s.bits for n, s in weights.items()}.items() <= {n: s.bits for n, s in saved.items()}.items()
    assert {n: s.bits for n, s in states.items()}.items() <= {n: s.bits for n, s in saved.items()}.items()
    after, again = (_sketches(trace, content="weights", update=1) for trace in (first, resumed))
    assert {n: s.bits for n, s in after.items()} == {n: s.bits for n, s in again.items()}
    verdict = compare(first, first)  # BatchNorm of each rank's own batch is the first difference
    (cell,) = (one for one in verdict.cells if (one.update, one.stage) == (0, "save"))
    assert (cell.state, cell.num_compared) == ("equal bits", len(saved) - 1)  # lr 0 is not a tensor of the update
