"""A run in float64 takes the steps of the script, with its parameters, optimizers and random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from echelon.verify.recorders.batches import Batches
from echelon.verify.recorders.float64 import Float64
from echelon.verify.recorders.keyed_dropout import KeyedDropout
from echelon.verify.recorders.sample_rows import rows_of
from echelon.verify.recording import recording
from echelon.verify.trace import Batch, RecordingSettings, read_trace
from tests.harness import run_on_ranks


@contextmanager
def _in_float64(folder: Path) -> Iterator[None]:
    with recording(folder, RecordingSettings(steps=100), rank=0) as one:
        batches = Batches(one)
        Float64(one, batches)
        KeyedDropout(one, batches)
        yield


class _Net(nn.Module):
    """Has what a conversion may miss: a buffer, tied weights, batch statistics, casts to float32, tensors made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((6,), 0.3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.scale: torch.Tensor
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.norm(self.embed(ids) * self.scale + x).float()
        hidden = hidden @ torch.eye(6) + torch.zeros(6, dtype=torch.float32) + torch.ones(6).to(torch.bfloat16)
        return self.head(torch.softmax(hidden, dim=-1, dtype=torch.float32).to(x.dtype))


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator)
    return TensorDataset(
        x, torch.randint(0, 11, (24,), generator=generator), torch.randint(0, 11, (24,), generator=generator)
    )


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, after: Callable[[], None] = lambda: None
) -> None:
    for x, ids, y in DataLoader(_data(), batch_size=8):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            criterion(model(x, ids), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def _doubled() -> tuple[_Net, nn.Module]:
    """Return the model and the loss in float64, converted by torch."""
    torch.manual_seed(0)
    return _Net().double(), nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1, 11, dtype=torch.float32).double())


def _expected() -> tuple[_Net, torch.optim.Optimizer]:
    """The loop in float64, written out."""
    model, criterion = _doubled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, ids, y in DataLoader(_data(), batch_size=8):
        hidden = model.norm(model.embed(ids) * model.scale + x.double()) + 1
        criterion(model.head(torch.softmax(hidden, -1)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_script_takes_its_steps_in_float64(tmp_path: Path) -> None:
    """Tolerance: a few units in the last place of float64; float32 differs by 1e-7."""
    torch.manual_seed(0)
    model = _Net()
    objects = [*model.parameters(), *model.buffers()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1, 11))
    with _in_float64(tmp_path):
        _train(model, optimizer, criterion)
    reference, steps = _expected()
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], objects, strict=True))
    assert model.head.weight is model.embed.weight
    assert model.count.dtype is torch.long
    assert model.count == 3
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.norm.running_var, reference.norm.running_var, rtol=1e-12, atol=0)
    for a, b in zip(optimizer.state.values(), steps.state.values(), strict=True):
        torch.testing.assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-11, atol=1e-16)


def test_autocast_is_off(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with _in_float64(tmp_path), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled("cpu")
        out = model(x)
    assert out.dtype is torch.float64
    torch.testing.assert_close(out, x.double() @ model.weight.T + model.bias, rtol=1e-14, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(x, x.T).dtype is torch.bfloat16


def test_an_optimizer_state_that_was_loaded_before_is_converted(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(model).double()
    other = torch.optim.Adam(twin.parameters(), lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with _in_float64(tmp_path):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        assert b.grad is not None
        a.grad = b.grad.clone()
    other.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    assert all(state["step"].dtype is torch.float32 for state in optimizer.state.values())


def test_averaged_copies_are_converted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _in_float64(tmp_path):
        _train(model, optimizer, nn.CrossEntropyLoss(), after=lambda: average.update_parameters(model))
        assert {one.dtype for one in average.module.parameters()} == {torch.float64}


def test_random_numbers_are_those_of_float32(tmp_path: Path) -> None:
    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(7)
        x = torch.zeros(50)
        return [
            torch.randn(50),
            torch.rand(5, 5, dtype=torch.float32),
            torch.randn_like(x),
            torch.normal(x, x + 1.0),
            torch.empty(20).uniform_(-1, 1),
            torch.empty(20).normal_(),
            torch.bernoulli(torch.full((50,), 0.3)),
            torch.multinomial(torch.linspace(0.1, 1, 9), 5),
            nn.init.xavier_uniform_(torch.empty(4, 4)),
            torch.randperm(9),
            torch.randint(0, 9, (4,)),
            torch.distributions.Normal(0.0, 1.0).sample((3,)),
            F.gumbel_softmax(torch.zeros(4), hard=True),
        ]

    own = drawn()
    model = nn.Linear(1, 1)
    with _in_float64(tmp_path):
        model(torch.ones(1, 1))
        twin = drawn()
        built = nn.Linear(2, 2)
    for a, b in zip(own, twin, strict=True):
        assert b.dtype is (torch.float64 if a.is_floating_point() else a.dtype)
        torch.testing.assert_close(a.to(b.dtype), b, rtol=1e-6, atol=1e-7)
        assert torch.equal(a, b.to(a.dtype))
    assert built.weight.dtype is torch.float64


def test_datasets_compute_in_their_own_dtype(tmp_path: Path) -> None:
    """So that the samples of both runs are the same."""

    class Thirds(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index, 1]).float() / 3 + torch.zeros(2)

    model, own = nn.Linear(2, 1), list(DataLoader(Thirds()))
    with _in_float64(tmp_path):
        for x, expected in zip(DataLoader(Thirds()), own, strict=True):
            assert x.dtype is torch.float64
            assert torch.equal(x, expected.double())
            model(x)
    batches = [one for one in read_trace(tmp_path).ranks[0] if isinstance(one, Batch)]
    assert [one.rows for one in batches] == [rows_of(x).rows for x in own]  # type: ignore[union-attr]


def test_everything_is_undone(tmp_path: Path) -> None:
    before = (torch.autocast.__init__, nn.parallel.DistributedDataParallel.__init__, torch.get_default_dtype())
    with _in_float64(tmp_path):
        nn.Linear(1, 1)(torch.ones(1, 1))
        assert torch.zeros(1).dtype is torch.float64
    assert (torch.autocast.__init__, nn.parallel.DistributedDataParallel.__init__, torch.get_default_dtype()) == before
    assert torch.zeros(1).dtype is torch.float32
    assert torch.ones(1).double().float().dtype is torch.float32


def _keep(reduced: list[torch.dtype], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    reduced.append(bucket.buffer().dtype)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _wrapped(folder: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = _Net()
    criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1, 11))
    with _in_float64(Path(folder)):
        ddp = nn.parallel.DistributedDataParallel(model)
        reduced: list[torch.dtype] = []
        ddp.register_comm_hook(reduced, lambda state, bucket: _keep(state, bucket))  # its annotations are strings here
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        _train(ddp, optimizer, criterion)
    assert reduced == [torch.float64] * 3  # hooks of the wrapper still run
    return [one.detach() for one in model.parameters()]


def test_a_wrapped_model_takes_the_same_steps(tmp_path: Path) -> None:
    (found,) = run_on_ranks(_wrapped, str(tmp_path), world_size=1)
    for a, b in zip(found, _expected()[0].parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_low_precision_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Linear(3, 3).to(dtype)
    x: Any = torch.randn(2, 3, dtype=dtype)
    with _in_float64(tmp_path):
        out = model(x.half() if dtype is torch.float16 else x)
    assert torch.equal(out, F.linear(x.double(), model.weight, model.bias))
