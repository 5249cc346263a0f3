"""parity="bitwise": the same weights, to the last bit, on any number of processes."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import RanksFailed, run_on_ranks

STEPS = 20
BATCH = 24  # shards of 3; 5 * 24 + 5 samples: the last update of a pass has empty shards


class _CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 6, 3)
        self.norm = nn.GroupNorm(2, 6)
        self.out = nn.Linear(6 * 6 * 6, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.convolution(x.view(-1, 1, 8, 8))).relu()
        out: torch.Tensor = self.out(self.dropout(hidden.flatten(1)))
        return out


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 16)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        )
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.blocks(self.inside(x.view(-1, 8, 8))).mean(1))
        return out


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))


MODELS: dict[str, Any] = {"mlp": _mlp, "cnn": _CNN, "transformer": _Transformer}


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(5 * BATCH + 5, 64, generator=generator), torch.randint(4, (5 * BATCH + 5,), generator=generator)
    )


def _run(
    kind: str, engine: str | None, weighted: bool = False, plain_loop: bool = False
) -> tuple[list[Any], list[float], list[float]]:
    """Return weights, losses and norms after 20 updates."""
    torch.manual_seed(0)
    model: Any = MODELS[kind]()
    accelerator = Accelerator(parity="bitwise", engine=engine, seed=3)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(_data(), batch_size=BATCH, shuffle=True)
    )
    losses, norms = [], []
    while accelerator.progress.step < STEPS:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss, num_items=len(x) + int(y[0]) if weighted else None)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(accelerator.update_loss())
    weights = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    return weights, losses, norms


@pytest.mark.parametrize("kind", MODELS)
def test_weights_losses_and_norms_have_the_same_bits_on_any_number_of_processes(kind: str) -> None:
    ((weights, losses, norms),) = run_on_ranks(_run, kind, None, world_size=1)
    assert losses[-1] < losses[0]
    assert max(norms) > 0.5  # clipping did something
    for world_size, engine in [(2, "ddp"), (3, "ddp"), (4, "ddp"), (2, "zero1")]:
        for other, other_losses, other_norms in run_on_ranks(_run, kind, engine, world_size=world_size):
            assert all(map(torch.equal, weights, other)), (world_size, engine)
            assert (other_losses, other_norms) == (losses, norms), (world_size, engine)


def _plain(weighted: bool) -> list[torch.Tensor]:
    """The whole batches in plain PyTorch, without dropout; a sample weighs what its shard says."""
    torch.manual_seed(0)
    model = _smooth()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = _data()
    for epoch in range(2):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(3 + epoch))
        for batch in order.split(BATCH):
            size, extra = divmod(len(batch), 8)
            shards = batch.split([size + (i < extra) for i in range(8)])
            x, y = data.tensors
            pairs = [(x[i].double(), y[i]) for i in shards if len(i)]
            counts = [len(labels) + int(labels[0]) if weighted else len(labels) for _, labels in pairs]
            losses = [nn.functional.cross_entropy(model(inputs), labels) for inputs, labels in pairs]
            optimizer.zero_grad()
            (sum(n * loss for n, loss in zip(counts, losses)) / sum(counts)).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def _smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def _weighted(weighted: bool, form: str, num_shards: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = _smooth()
    accelerator = Accelerator(parity="bitwise", seed=3, canonical_shards=num_shards)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(_data(), batch_size=BATCH, shuffle=True)
    )
    for _ in range(2):
        for x, y in loader:
            n = len(x) + int(y[0]) if weighted else None
            with accelerator.accumulate(model) if form != "without accumulate" else nullcontext():
                loss = nn.functional.cross_entropy(model(x.double()), y)
                if form == "two losses":  # of one micro-step: they are added up
                    accelerator.backward(0.25 * loss, num_items=n, retain_graph=True)
                    accelerator.backward(0.75 * loss, num_items=n)
                else:
                    accelerator.backward(loss, num_items=n)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("form", ["accumulate", "without accumulate", "two losses"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_update_is_that_of_plain_pytorch(weighted: bool, form: str) -> None:
    expected = _plain(weighted)
    runs = [run_on_ranks(_weighted, weighted, form, world_size=n) for n in (1, 2, 3)]
    for found in runs[0][0], runs[1][1], runs[2][2]:
        assert all((p - q).norm() <= 1e-12 * q.norm() for p, q in zip(found, expected))  # float64
        assert all(map(torch.equal, found, runs[0][0]))


def test_processes_with_one_shard_each_weigh_it_as_others_do() -> None:
    one, two = (run_on_ranks(_weighted, True, "accumulate", 2, world_size=n)[0] for n in (1, 2))
    assert all(map(torch.equal, one, two))


def _evaluated(batch_size: int) -> torch.Tensor:
    torch.manual_seed(0)
    model: Any = _mlp()
    accelerator = Accelerator(parity="bitwise", seed=3)
    model, loader = accelerator.prepare(model, DataLoader(_data(), batch_size=batch_size))
    model.eval()
    with torch.no_grad():
        return torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in loader])


@pytest.mark.parametrize("batch_size", [5, 24])
def test_evaluation_gives_the_same_bits_in_the_order_of_the_data(batch_size: int) -> None:
    (whole,) = run_on_ranks(_evaluated, batch_size, world_size=1)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = _mlp().eval()(_data().tensors[0])
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)  # float32, kernels of other sizes
    for world_size in (2, 3):
        assert all(torch.equal(found, whole) for found in run_on_ranks(_evaluated, batch_size, world_size=world_size))


def _seen() -> list[float]:
    accelerator, model, _, loader = _prepared(_mlp())
    assert model.training
    return sorted(value for x, _ in loader for value in accelerator.gather_for_metrics(x[:, 0]).tolist())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_on_loan_to_an_empty_shard_is_no_result(world_size: int) -> None:
    expected = sorted(_data().tensors[0][:, 0].tolist())  # the last update has fewer samples than shards
    assert run_on_ranks(_seen, world_size=world_size) == [expected] * world_size


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*_data().tensors))


def _dispatched(dispatch: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    options = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(parity="bitwise", seed=3, dataloader_config=options)
    model: Any = _mlp()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(_Stream(), batch_size=BATCH)
    )
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("dispatch", [True, False])
def test_a_stream_gives_the_same_bits_whoever_reads_it(dispatch: bool) -> None:
    (expected,) = run_on_ranks(_dispatched, dispatch, world_size=1)
    for world_size in (2, 3):
        for found in run_on_ranks(_dispatched, dispatch, world_size=world_size):
            assert all(map(torch.equal, found, expected))


def _half(folder: str, number: int, last: int) -> list[torch.Tensor]:
    """Train 3 updates from where the checkpoint before ``number`` is, and save."""
    torch.manual_seed(0)
    accelerator = Accelerator(parity="bitwise", seed=3)
    model: Any = _mlp()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(_data(), batch_size=BATCH, shuffle=True)
    )
    if number:
        with warnings.catch_warnings():  # shards have random numbers of their own: nothing goes on
            warnings.filterwarnings("ignore", ".*random states of", EchelonWarning)
            accelerator.load_state(f"{folder}/{number - 1}")
    stop = 3 * (number + 1) if number < last else 12
    while accelerator.progress.step < stop:
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.progress.step == stop:
                accelerator.save_state(f"{folder}/{number}")
                break
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


def test_the_number_of_processes_may_change_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    (expected,) = run_on_ranks(_half, str(tmp_path / "whole"), 0, 0, world_size=1)
    for number, world_size in enumerate([1, 4, 3, 2]):
        found = run_on_ranks(_half, str(tmp_path / "parts"), number, 3, world_size=world_size)
    assert all(torch.equal(p, q) for one in found for p, q in zip(one, expected))


def _prepared(model: nn.Module, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(parity="bitwise", seed=3, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer, DataLoader(_data(), batch_size=BATCH)))


def _turns() -> None:
    accelerator, model, optimizer, loader = _prepared(_mlp(), canonical_shards=2)
    for x, y in loader:
        for _ in range(2):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()


def _outside() -> None:
    accelerator, model, *_ = _prepared(_mlp())
    accelerator.backward(model(torch.ones(3, 64)).sum())


def _norms_that_train_later() -> None:
    _, model, _, loader = _prepared(nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4)).eval())
    model.train()
    next(iter(loader))


def _fractions() -> None:
    accelerator, model, _, loader = _prepared(_mlp())
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y), num_items=2.5)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (_turns, UsageError, "came after an optimizer's step"),
    (_outside, UsageError, "outside the loop of a prepared DataLoader"),
    (_norms_that_train_later, UsageError, "1: a BatchNorm in training mode"),
    (_fractions, UsageError, "num_items=2.5 is not a whole number"),
    (partial(_prepared, nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4))), UsageError, "1: a BatchNorm in training"),
    (partial(_prepared, _mlp(), canonical_shards=1), ConfigError, "canonical_shards=1 for 2 processes"),
    (partial(_prepared, _mlp(), max_micro_batch_size=2), ConfigError, "give canonical_shards=12"),
    (
        partial(_prepared, _mlp(), kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")]),
        ConfigError,
        "here DDP sends no gradients",
    ),
    (partial(_prepared, _mlp(), engine="fsdp2"), UsageError, "the engine fsdp2 cannot"),
]


@pytest.mark.parametrize(("run", "kind", "text"), REFUSED)
def test_what_would_make_the_bits_depend_on_the_number_of_processes_is_refused(
    run: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(run, world_size=2)
    assert all(isinstance(error, kind) for error in caught.value.errors.values()), caught.value
    assert text in str(caught.value)


def _threads() -> int:
    torch.set_num_threads(2)
    _prepared(_mlp())
    return torch.get_num_threads()


def test_the_number_of_threads_is_that_of_the_environment() -> None:
    assert run_on_ranks(_threads, world_size=2) == [1, 1]  # OMP_NUM_THREADS of the ranks of tests
