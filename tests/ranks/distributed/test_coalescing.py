"""Blocks of coalesced collectives that fail: torch skips all later collectives of the group, unless echelon ends the block."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager  # by name, before echelon sees it
from torch.nn.parallel import DistributedDataParallel

from echelon import Accelerator, Trainer, TrainingArguments
from echelon.base.warnings import EchelonWarning
from echelon.distributed import cleanup, setup
from echelon.distributed.checks.coalescing import stop_guarding_coalescing
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import all_warnings


def _swallowed(kind: str) -> list[str]:
    """A program's block that fails, with the exception caught; return the warnings' texts."""
    with all_warnings() as caught:
        try:
            with _coalescing_manager(device=torch.device("cpu") if kind == "device" else None):
                dist.all_reduce(torch.ones(1))
                if kind == "error":
                    raise KeyError("in the block")
        except (RuntimeError, KeyError):
            pass
    return [str(one.message) for one in caught if issubclass(one.category, EchelonWarning)]


def _sum() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def _plain_torch(kind: str) -> float:
    stop_guarding_coalescing()  # an accelerator of an earlier test in this worker has installed it
    _swallowed(kind)
    result = _sum()
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    return result


@pytest.mark.parametrize("kind", ["device", "error"])
def test_torch_alone_skips_collectives_after_a_failed_block(kind: str) -> None:
    assert run_on_ranks(_plain_torch, kind) == [1.0, 1.0]  # if this fails, torch has been fixed


def _level_1(kind: str) -> tuple[float, list[str], float]:
    setup()
    try:
        said = _swallowed(kind)
        total = torch.ones(1)
        with _coalescing_manager():  # without a device, gloo runs them together
            dist.all_reduce(total)
        return _sum(), said, total.item()
    finally:
        cleanup()


@pytest.mark.parametrize(
    ("kind", "words"), [("device", "gloo cannot coalesce"), ("error", "1 coalesced collectives did not run")]
)
def test_collectives_run_after_a_failed_block_and_the_failure_is_named(kind: str, words: str) -> None:
    for total, said, coalesced in run_on_ranks(_level_1, kind, init_group=False):
        assert (total, coalesced) == (2.0, 2.0)
        assert len(said) == 1
        assert words in said[0]
        assert "test_coalescing.py" in said[0] or kind == "error"


def _uncaught() -> str:
    setup()
    dist.barrier()  # a rank that leaves before the other one has connected would fail that one's setup
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _coalescing_manager(device=torch.device("cpu")):
                dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    finally:
        cleanup()
    return "no error"


def test_the_error_says_what_and_where_and_what_to_do() -> None:
    (text, *_) = run_on_ranks(_uncaught, init_group=False)
    assert "gloo, cannot coalesce collectives" in text
    assert "test_coalescing.py" in text
    assert "one by one without _coalescing_manager" in text


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double(), torch.randn(4, 3, dtype=torch.float64)


def _trained(level: str) -> list[float]:
    """Two updates of which the first follows a failed block; each rank has half of the rows."""
    model: Any
    model, rows = _net()
    if level == "trainer":
        return _trained_by_trainer(model, rows)
    if level == "accelerator":
        accelerator = Accelerator(cpu=True)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        setup()
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = rows[dist.get_rank() :: 2]
    for _ in range(2):
        _swallowed("device")
        optimizer.zero_grad()
        loss = model(mine).square().mean()
        accelerator.backward(loss) if level == "accelerator" else loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        optimizer.param_groups[0]["lr"] = float(mean)  # a collective of the program's own that enters the update
        optimizer.step()
    found = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    cleanup()
    return found


def _trained_by_trainer(model: nn.Module, rows: torch.Tensor) -> list[float]:
    class Program(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> Any:
            _swallowed("device")
            loss = model(inputs["x"]).square().mean()
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            for group in self.optimizer.param_groups:
                group["lr"] = float(mean)
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=2, per_device_train_batch_size=2, optim="sgd", max_grad_norm=0.0,
            report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        Program(model=model, args=arguments, train_dataset=[{"x": row} for row in rows]).train()
    cleanup()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("level", ["setup", "accelerator", "trainer"])
def test_a_program_that_swallows_the_exception_trains_like_one_process(level: str) -> None:
    model, rows = _net()
    for _ in range(2):
        model.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(p.grad * loss)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for found in run_on_ranks(_trained, level, init_group=False):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-12, atol=0)


def _late() -> None:
    stop_guarding_coalescing()
    _swallowed("device")
    _sum()
    try:
        Accelerator(cpu=True)
    finally:
        stop_guarding_coalescing()


def test_collectives_that_were_skipped_before_the_accelerator_stop_the_program() -> None:
    with pytest.raises(
        RanksFailed, match="torch has skipped 1 collectives since a block of coalesced collectives failed"
    ):
        run_on_ranks(_late)
