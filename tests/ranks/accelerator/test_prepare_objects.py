"""Weights that are cast and optimizers that are made late: what they train; and arguments that ``prepare`` returns unchanged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import errors_on_ranks, run_on_ranks
from tests.prepared_loop import all_warnings, marked_line, train_prepared, weights_of
from tests.reference import train_updates

X = torch.arange(96.0).reshape(-1, 3).sin()
LAYOUTS = [(1, "single"), (2, "ddp"), (2, "zero1"), (2, "fsdp2 stage 2"), (2, "fsdp2 stage 3")]


def _accelerator(engine: str, **settings: Any) -> Accelerator:
    if engine.startswith("fsdp2"):
        is_stage_3 = engine == "fsdp2 stage 3"
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=is_stage_3)
    return Accelerator(cpu=True, engine=engine.split()[0], **settings)


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()  # type: ignore[no-any-return]


def _share(k: int) -> torch.Tensor:
    """Return this rank's part of the 4 samples of an update."""
    return X[4 * k : 4 * k + 4].chunk(dist.get_world_size())[dist.get_rank()]


def _plain(casts_after: int | None = None) -> list[torch.Tensor]:
    model = _model()

    def loss_of(k: int) -> torch.Tensor:
        if k == casts_after:
            model.double()
        return _loss(model, X[4 * k : 4 * k + 4].to(model[0].weight.dtype))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_updates(model, loss_of, [[k] for k in range(6)], optimizer).weights


def _expect(found: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Compare weights; averages over ranks and over samples round differently, six times: a few epsilons of float32."""
    for mine, wanted in zip(found, want, strict=True):
        assert mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


# ---- an optimizer that is made late ----------------------------------------------------------------------------------


def _make_late(engine: str, looks: str) -> list[torch.Tensor]:
    accelerator = _accelerator(engine)
    model = accelerator.prepare(_model())
    if looks == "forward":
        model(_share(0))
    elif looks == "backward":
        _loss(model, _share(0)).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
    else:
        with torch.no_grad():
            model(_share(0))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    train_prepared(accelerator, model, optimizer, map(_share, range(6)), loss_of=lambda x: _loss(model, x))
    return weights_of(accelerator, model)


@pytest.mark.sample(4)
@pytest.mark.parametrize("looks", ["forward", "backward", "no_grad"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_that_is_made_after_a_forward_pass_trains(layout: tuple[int, str], looks: str) -> None:
    for found in run_on_ranks(_make_late, layout[1], looks, world_size=layout[0]):
        _expect(found, _plain())


def _make_late_and_unprepared() -> None:
    accelerator = _accelerator("fsdp2 stage 2")
    model = accelerator.prepare(_model())
    model(_share(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.backward(_loss(model, _share(0)))
    optimizer.step()


def test_an_unprepared_optimizer_of_unsharded_parameters_is_refused() -> None:
    for text in errors_on_ranks(UsageError, _make_late_and_unprepared, world_size=2, num_errors=2):
        assert "holds 4 parameters that prepare() replaced with sharded ones" in text
        assert "optimizer = accelerator.prepare(optimizer)" in text


# ---- casts -----------------------------------------------------------------------------------------------------------


def _cast_after_prepare(engine: str, after: int) -> list[torch.Tensor]:
    accelerator = _accelerator(engine)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for k in range(6):
        if k == after:
            model.double()
        x = _share(k)
        accelerator.backward(_loss(model, x if k < after else x.double()))
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(accelerator, model)


@pytest.mark.sample(3)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_may_be_cast_after_prepare(layout: tuple[int, str], after: int) -> None:
    if after and layout[1].startswith("fsdp2"):
        errors = errors_on_ranks(UsageError, _cast_after_prepare, layout[1], after, world_size=layout[0])
        assert {"0.weight was cast from torch.float32 to torch.float64 after the first" in str(e) for e in errors} == {
            True
        }
        return
    for found in run_on_ranks(_cast_after_prepare, layout[1], after, world_size=layout[0]):
        _expect(found, _plain(casts_after=after))


# ---- a static graph --------------------------------------------------------------------------------------------------


def _train_static_graph(num_steps: int) -> list[torch.Tensor]:
    handler = DistributedDataParallelKwargs(static_graph=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps, kwargs_handlers=[handler])
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_prepared(accelerator, model, optimizer, map(_share, range(8)), loss_of=lambda x: _loss(model, x))
    return weights_of(accelerator, model)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_static_graph_may_accumulate(num_steps: int) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = train_updates(model, lambda x: _loss(model, x), X.view(-1, 1, 4 * num_steps, 3), optimizer)
    for found in run_on_ranks(_train_static_graph, num_steps, world_size=2):
        _expect(found, plain.weights)


# ---- a second Accelerator --------------------------------------------------------------------------------------------


def _prepare_anothers(engine: str) -> list[str]:
    first, second = _accelerator(engine), _accelerator(engine)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = model, optimizer, schedule, DataLoader(TensorDataset(X))
    prepared = first.prepare(*given)
    texts = []
    for one in prepared:
        try:
            second.prepare(one)
        except UsageError as error:
            texts.append(str(error))
    assert first.prepare(*prepared) == prepared
    return texts


@pytest.mark.parametrize("layout", [(1, "single"), (2, "ddp"), (2, "zero1")])
def test_what_another_accelerator_has_prepared_is_refused(layout: tuple[int, str]) -> None:
    # On one process, the model is the user's own.
    expected = [
        *(["accelerator.unwrap_model(model)"] if layout[0] > 1 else []),
        "optimizer.optimizer",
        "scheduler.scheduler",
    ]
    for texts in run_on_ranks(_prepare_anothers, layout[1], world_size=layout[0]):
        assert len(texts) == len(expected) + 1
        for text, how in zip(texts, [*expected, "loader.original"], strict=True):
            assert "that another Accelerator has prepared" in text
            assert how in text


# ---- a scheduler whose metric has a default --------------------------------------------------------------------------


class _Halves:
    """Halves the rate at each step; with a metric, only if that is above 1."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, metrics: float | None = None) -> None:
        if metrics is None or metrics > 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {}


def _step_with_metric(engine: str) -> list[float]:
    from echelon.accelerator.update.scheduler import AcceleratedScheduler

    accelerator = _accelerator(engine)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    schedule = AcceleratedScheduler(
        _Halves(optimizer.optimizer),
        optimizer,
        gradient_state=accelerator.gradient_state,
        num_processes=accelerator.num_processes,
    )
    rates = []
    for metrics in (2.0, 0.5, None, 1.5 if dist.get_rank() else 1.0):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*got different metrics on different ranks")
            schedule.step() if metrics is None else schedule.step(metrics=metrics)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    ("layout", "want"), [((1, "single"), [0.5, 0.5, 0.25, 0.25]), ((2, "ddp"), [0.5, 0.5, 0.125, 0.0625])]
)
def test_a_scheduler_called_with_a_metric_steps_once(layout: tuple[int, str], want: list[float]) -> None:
    """Without a metric it counts batches: as many as there are processes. The mean of 1.0 and 1.5 is above 1."""
    for rates in run_on_ranks(_step_with_metric, layout[1], world_size=layout[0]):
        assert rates == want


ROWS = torch.arange(8.0).view(4, 2)
DATA: dict[str, tuple[Any, str]] = {
    "generator": (lambda: (x for x in ROWS), "generator"),
    "iterator of a loader": (lambda: iter(DataLoader(TensorDataset(ROWS))), "_SingleProcessDataLoaderIter"),
    "zip": (lambda: zip(ROWS, ROWS), "zip"),
    "dataset": (lambda: TensorDataset(ROWS), "TensorDataset"),
    "tensor": (lambda: ROWS, "Tensor"),
    "list of batches": (lambda: [(ROWS, ROWS), (ROWS, ROWS)], "list"),
    "dict of tensors": (lambda: {"x": ROWS}, "dict"),
}
OTHER: dict[str, Any] = {
    "no scheduler": lambda model: None,
    "parameters": lambda model: list(model.parameters()),
    "parameter": lambda model: model.weight,
    "config": lambda model: {"lr": 0.1, "name": "x"},
    "function": lambda model: torch.nn.functional.mse_loss,
    "empty list": lambda model: [],
    "nested": lambda model: {"loader": DataLoader(TensorDataset(ROWS)), "name": "x"},
}


def _prepare(kind: str, parity: str) -> tuple[list[tuple[str, str]], str, bool]:
    accelerator = Accelerator(cpu=True, parity=parity, seed=0)
    model = torch.nn.Linear(2, 1)
    third = DATA[kind][0]() if kind in DATA else OTHER[kind](model)
    text, is_same = "", False
    with all_warnings() as caught:
        try:
            _, _, result = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), third)  # PREPARE
            is_same = result is third
        except UsageError as error:
            text = str(error)
    said = [(str(w.message), f"{Path(w.filename).name}:{w.lineno}") for w in caught if w.category is EchelonWarning]
    return said, text, is_same


@pytest.mark.parametrize("kind", DATA)
def test_data_that_is_no_loader_is_a_warning_on_several_processes(kind: str) -> None:
    first, second = run_on_ranks(_prepare, kind, "off", world_size=2)
    ((text, line),) = first[0]
    assert line == marked_line(__file__, "PREPARE")
    assert (
        f"argument 3 of prepare(), a {DATA[kind][1]}, stays unchanged: each of the 2 processes reads all of it" in text
    )
    assert "pass a DataLoader" in text
    assert "do not pass this object to prepare()" in text
    assert second[0] == []
    assert first[2] or kind in ("list of batches", "dict of tensors")  # a container is rebuilt


def test_data_that_is_no_loader_is_an_error_in_an_exact_mode() -> None:
    for said, text, _ in run_on_ranks(_prepare, "generator", "exact", world_size=2):
        assert said == []
        assert "argument 3 of prepare(), a generator, stays unchanged" in text
        assert marked_line(__file__, "PREPARE") in text


@pytest.mark.parametrize("kind", OTHER)
def test_other_arguments_are_returned_without_a_warning(kind: str) -> None:
    for said, text, _ in run_on_ranks(_prepare, kind, "off", world_size=2):
        assert (said, text) == ([], "")


def test_one_process_reads_all_data_anyway() -> None:
    for kind in DATA:
        said, text, _ = _prepare(kind, "off")
        assert (said, text) == ([], "")


def test_none_is_returned_as_none() -> None:
    """Scripts prepare a scheduler that may be None, alone or with others."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare(None) is None
    assert accelerator.prepare(None, None) == (None, None)
    assert accelerator.prepare_scheduler(None) is None  # type: ignore[arg-type]


def test_a_string_alone_is_an_error_and_beside_others_it_is_returned() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match=r"prepare\(\) got no object that it can prepare: str"):
        accelerator.prepare("model")
    model = torch.nn.Linear(2, 1)
    assert accelerator.prepare(model, "model") == (model, "model")
