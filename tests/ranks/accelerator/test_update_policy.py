"""What is pending in an update (its micro-steps, its gradients, what fp16 has done to them) ends with it, on every engine.

The references are plain loops in float64: a loss scale is a power of two, so it does not round. Sums in another order: 1e-12.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.utils import GradScalerKwargs
from tests.harness import run_on_ranks
from tests.prepared_loop import weights_of
from tests.reference import train_updates

SIZE = 4  # samples of a micro-step, on all ranks together
X = torch.arange(16.0 * SIZE * 3, dtype=torch.float64).reshape(-1, 3).sin()
LAYOUTS = [(1, "single"), (2, "ddp"), (2, "zero1"), (2, "fsdp2 stage 2"), (2, "fsdp2 stage 3")]
PARITIES = ["off", "exact", "bitwise"]
HOW = ["norm", *(pytest.param(how, marks=pytest.mark.soak) for how in ("value", "unscale"))]


def _model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()  # type: ignore[no-any-return]


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _plain(*windows: range, seed: int = 0) -> list[torch.Tensor]:
    """Return the weights after one update for each window, a range of micro-steps."""
    model = _model(seed)
    return train_updates(
        model, lambda k: _loss(model, X[SIZE * k : SIZE * (k + 1)]), windows, _optimizer(model)
    ).weights


class _Run:
    """The objects of a training."""

    def __init__(self, engine: str, parity: str, num_steps: int, *, fp16: bool = False) -> None:
        options: dict[str, Any] = {}
        if engine.startswith("fsdp2"):
            is_stage_3 = engine == "fsdp2 stage 3"
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=is_stage_3)
        if fp16:
            options |= {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=1024.0)]}
        self.num_steps, self.parity = num_steps, parity
        self.accelerator = Accelerator(
            cpu=True, engine=engine.split()[0], parity=parity, gradient_accumulation_steps=num_steps, **options
        )
        self.prepare()

    def prepare(self, seed: int = 0) -> None:
        # In the exact modes the batch is that of an update, else that of one process in a micro-step.
        size = SIZE * self.num_steps if self.parity != "off" else SIZE // dist.get_world_size()
        loader = DataLoader(TensorDataset(X), batch_size=size)
        model = _model(seed)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, _optimizer(model), loader)

    def backward(self, x: torch.Tensor) -> None:
        self.accelerator.backward(_loss(self.model, x))

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *, num_updates: int = 2, leaves_window: bool = False) -> None:
        """Make some updates, and begin another one with ``leaves_window``."""
        done = 0
        for (x,) in self.loader:
            with self.accelerator.accumulate(self.model):
                self.backward(x)
                self.finish()
            if leaves_window and done == num_updates:
                break
            done += self.accelerator.sync_gradients
            if done == num_updates and not leaves_window:
                break

    def weights(self) -> list[torch.Tensor]:
        return weights_of(self.accelerator, self.model)


def _check(
    layout: tuple[int, str], run: Callable[..., Any], want: list[torch.Tensor], *args: Any, fp16: bool = False
) -> None:
    world_size, engine = layout
    for found in run_on_ranks(run, engine, *args, world_size=world_size):
        _expect(found, want, is_fp16=fp16 and engine.startswith("fsdp2"))


def _expect(found: list[torch.Tensor], want: list[torch.Tensor], *, is_fp16: bool) -> None:
    """Compare weights. ``is_fp16``: fully_shard computes in fp16, with an epsilon of 1e-3; gradients add up a few such numbers."""
    for mine, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-12, atol=4e-3 if is_fp16 else 1e-14)


# ---- fp16 ------------------------------------------------------------------------------------------------------------


def _read(run: _Run, how: str) -> None:
    """Do what divides the gradients by the loss scale, without a change of them."""
    if how == "norm":
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1e6)
    elif how == "value":
        run.accelerator.clip_grad_value_(run.model.parameters(), 1e6)
    else:
        run.accelerator.unscale_gradients()


def _skip_updates(engine: str, parity: str, how: str) -> list[torch.Tensor]:
    run = _Run(engine, parity, 1, fp16=True)
    for k, (x,) in enumerate(run.loader):
        run.backward(x)
        _read(run, how)
        if k in (1, 2, 5):  # as if the norm were too large
            run.optimizer.zero_grad()
        else:
            run.finish()
        if k == 7:
            break
    return run.weights()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("parity", ["off", "exact"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_fp16_update_that_the_loop_skips_leaves_the_next_gradients_scaled(
    layout: tuple[int, str], parity: str, how: str
) -> None:
    want = _plain(*(range(k, k + 1) for k in (0, 3, 4, 6, 7)))
    _check(layout, _skip_updates, want, parity, how, fp16=True)


def _clip_in_each_micro_step(engine: str, parity: str, how: str) -> list[torch.Tensor]:
    run = _Run(engine, parity, 2, fp16=True)
    for k, (x,) in enumerate(run.loader):
        with run.accelerator.accumulate(run.model):
            run.backward(x)
            _read(run, how)
            _read(run, how)
            run.finish()
        if k == 7:
            break
    return run.weights()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("parity", ["off", "exact"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp16_gradients_may_be_clipped_in_each_micro_step(layout: tuple[int, str], parity: str, how: str) -> None:
    want = _plain(*(range(k, k + 2) for k in (0, 2, 4, 6)))
    _check(layout, _clip_in_each_micro_step, want, parity, how, fp16=True)


def _step_twice(engine: str) -> list[torch.Tensor]:
    run = _Run(engine, "off", 1, fp16=True)
    for k, (x,) in enumerate(run.loader):
        run.backward(x)
        run.optimizer.step()
        _read(run, "norm")
        run.optimizer.step()  # with the same gradients
        run.optimizer.zero_grad()
        if k == 2:
            break
    return run.weights()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_fp16_steps_with_the_same_gradients_are_equal(layout: tuple[int, str]) -> None:
    model = _model()
    optimizer = _optimizer(model)
    for k in range(3):
        optimizer.zero_grad()
        _loss(model, X[SIZE * k : SIZE * (k + 1)]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.step()
    _check(layout, _step_twice, [p.detach() for p in model.parameters()], fp16=True)


def _find_infinity(engine: str) -> tuple[float, list[torch.Tensor]]:
    run = _Run(engine, "off", 1, fp16=True)
    for k, (x,) in enumerate(run.loader):
        is_mine = dist.get_rank() == dist.get_world_size() - 1
        run.accelerator.backward(_loss(run.model, x) * (float("inf") if k == 1 and is_mine else 1.0))
        norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 1e6)
        if norm.isfinite():
            run.optimizer.step()
        run.optimizer.zero_grad()
        if k == 2:
            break
    assert run.accelerator.scaler is not None
    return run.accelerator.scaler.get_scale(), run.weights()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_infinite_update_that_the_loop_itself_skips_lowers_the_loss_scale(layout: tuple[int, str]) -> None:
    for scale, weights in run_on_ranks(_find_infinity, layout[1], world_size=layout[0]):
        assert scale == 512.0
        _expect(weights, _plain(range(1), range(2, 3)), is_fp16=layout[1].startswith("fsdp2"))


def _keep_one_optimizer_waiting(engine: str) -> list[torch.Tensor]:
    """Clip both models, of which only the first one steps; the second one's gradients wait for another loss."""
    run = _Run(engine, "off", 1, fp16=True)
    accelerator, other = run.accelerator, _model(1)
    other, waiting = accelerator.prepare(other, _optimizer(other))
    for k, (x,) in enumerate(run.loader):
        accelerator.backward(_loss(run.model, x) + _loss(other, x))
        accelerator.clip_grad_norm_(run.model.parameters(), 1e6)
        run.finish()
        if k % 2:
            waiting.step()
            waiting.zero_grad()
        if k == 3:
            break
    run.model = other
    return run.weights()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp16_gradients_of_an_optimizer_that_waits_keep_their_size(layout: tuple[int, str]) -> None:
    model = _model(1)
    optimizer = _optimizer(model)
    for k in range(4):
        _loss(model, X[SIZE * k : SIZE * (k + 1)]).backward()  # type: ignore[no-untyped-call]
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    _check(layout, _keep_one_optimizer_waiting, [p.detach() for p in model.parameters()], fp16=True)


# ---- windows that are left -------------------------------------------------------------------------------------------


def _train_again(engine: str, parity: str, end: str, fp16: bool) -> list[torch.Tensor]:
    run = _Run(engine, parity, 2, fp16=fp16)
    if end == "error":
        try:
            _fail(run)
        except RuntimeError:  # its traceback refers to the loop, and so to the loader's iterator
            run.accelerator.free_memory()
            run.prepare()
            run.train()
            return run.weights()
    run.train(num_updates=1, leaves_window=True)
    if fp16:
        _read(run, "norm")
    if end == "free":
        run.accelerator.free_memory()
        run.prepare()
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.prepare()
            run.train()
        if dist.get_rank() == 0:
            expected = "a new training begins" if parity == "off" else "the update's gradients are dropped"
            assert [expected in str(one.message) for one in caught if "EchelonWarning" in str(one.category)] == [True]
        return run.weights()
    run.train()
    return run.weights()


def _fail(run: _Run) -> None:
    for k, (x,) in enumerate(run.loader):
        with run.accelerator.accumulate(run.model):
            run.backward(x)
            if k == 2:
                raise RuntimeError("out of memory")
            run.finish()


@pytest.mark.parametrize("fp16", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("end", ["free", "error", "prepare"])
@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_after_one_that_ended_in_a_window_is_that_of_a_new_process(
    layout: tuple[int, str], parity: str, end: str, fp16: bool
) -> None:
    if fp16 and parity == "bitwise":
        pytest.skip("bitwise refuses fp16")
    _check(layout, _train_again, _plain(range(2), range(2, 4)), parity, end, fp16, fp16=fp16)


def _return_to_a_checkpoint(engine: str, parity: str, place: str, fp16: bool, folder: str) -> list[torch.Tensor]:
    run = _Run(engine, parity, 2, fp16=fp16)
    accelerator, num_updates = run.accelerator, 0
    for (x,) in run.loader:
        with accelerator.accumulate(run.model):
            if num_updates != 2:
                run.backward(x)
                run.finish()
            else:
                loss = _loss(run.model, x) * float("nan")
                if place != "forward":
                    accelerator.backward(loss)
                if place == "clip":
                    _read(run, "norm")
                # In the exact modes, an update that is dropped cannot be continued, so the return is at its end.
                if parity == "off" or accelerator.sync_gradients:
                    accelerator.load_state(folder)
        num_updates += accelerator.sync_gradients
        if num_updates == 1 and accelerator.sync_gradients:
            accelerator.save_state(folder)
        if num_updates == 5:
            break
    return run.weights()


@pytest.mark.parametrize(
    ("place", "fp16"),
    [
        ("forward", False),
        ("clip", True),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in [("forward", True), ("backward", False), ("backward", True)]
        ),
    ],
)
@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_return_to_a_checkpoint_drops_the_window(
    layout: tuple[int, str], parity: str, place: str, fp16: bool, tmp_path: Path
) -> None:
    if fp16 and parity == "bitwise":
        pytest.skip("bitwise refuses fp16")
    first = 5 if parity == "off" else 6  # micro-step of the next window
    want = _plain(range(2), range(first, first + 2), range(first + 2, first + 4))
    _check(layout, _return_to_a_checkpoint, want, parity, place, fp16, str(tmp_path / "saved"), fp16=fp16)
