"""Batches that a loop fetches before it trains them, or splits: the batch that is trained decides where a window ends.

The references are plain loops in float64; sums in another order: 1e-12.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.base.errors import UsageError
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import weights_of
from tests.reference import train_updates

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "zero1"), (2, "fsdp2")]
SIZE = 4  # samples of a micro-step, on all ranks together


def _data(num_micro_steps: int) -> torch.Tensor:
    return torch.arange(num_micro_steps * SIZE * 3, dtype=torch.float64).reshape(-1, 3).sin()


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()  # type: ignore[no-any-return]


def _plain(*windows: torch.Tensor) -> list[torch.Tensor]:
    """Return the weights after one update for each window, the samples of it."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_updates(model, lambda x: _loss(model, x), [[x] for x in windows], optimizer).weights


def _windows(num_micro_steps: int, num_epochs: int = 2) -> list[torch.Tensor]:
    return [*_data(num_micro_steps).split(4 * SIZE)] * num_epochs  # type: ignore[no-untyped-call]


# ---- loops -----------------------------------------------------------------------------------------------------------

Loop = Callable[[Any], Iterator[torch.Tensor]]  # yields what is trained


def windows_fetched_ahead(loader: Any) -> Iterator[torch.Tensor]:
    batches = iter(loader)
    while window := list(itertools.islice(batches, 4)):
        yield from (x for (x,) in window)


def windows_of_known_size(loader: Any) -> Iterator[torch.Tensor]:
    """Never ask for more batches than there are, so that the iterator does not come to its end."""
    batches, left = iter(loader), len(loader)
    while left:
        window = [next(batches) for _ in range(min(4, left))]
        left -= len(window)
        yield from (x for (x,) in window)


def one_fetched_ahead(loader: Any) -> Iterator[torch.Tensor]:
    batches = iter(loader)
    following = next(batches, None)
    while following is not None:
        now, following = following, next(batches, None)
        yield now[0]


def all_fetched_ahead(loader: Any) -> Iterator[torch.Tensor]:
    yield from (x for (x,) in list(loader))


def looked_at_before(loader: Any) -> Iterator[torch.Tensor]:
    first = next(iter(loader))
    assert len(first) == 1
    yield from (x for (x,) in loader)


def read_as_usual(loader: Any) -> Iterator[torch.Tensor]:
    yield from (x for (x,) in loader)


def windows_of_copies(loader: Any) -> Iterator[torch.Tensor]:
    batches = iter(loader)
    while window := [x + 0 for (x,) in itertools.islice(batches, 4)]:
        yield from window


def copies_of_all(loader: Any) -> Iterator[torch.Tensor]:
    yield from [x + 0 for (x,) in loader]


def split_in_two(loader: Any) -> Iterator[torch.Tensor]:
    for (x,) in loader:
        yield from x.chunk(2)


LOOPS = [
    windows_fetched_ahead,
    windows_of_known_size,
    one_fetched_ahead,
    all_fetched_ahead,
    looked_at_before,
    read_as_usual,
]


def _train(loop: Loop, engine: str, parity: str, num_micro_steps: int, size: int, num_epochs: int, steps: int) -> Any:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if engine == "fsdp2" else None
    accelerator = Accelerator(
        cpu=True, engine=engine, parity=parity, gradient_accumulation_steps=steps, fsdp_plugin=plugin
    )
    model = _model()
    loader = DataLoader(TensorDataset(_data(num_micro_steps)), batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    num_updates = 0
    for _ in range(num_epochs):
        for x in loop(loader):
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, x))
                num_updates += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
    return num_updates, weights_of(accelerator, model)


def _check(
    layout: tuple[int, str],
    loop: Loop,
    want: list[torch.Tensor],
    *,
    num: int,
    size: int,
    parity: str = "off",
    epochs: int = 2,
) -> None:
    world_size, engine = layout
    steps = 4 if parity == "off" else 1
    for num_updates, found in run_on_ranks(
        _train, loop, engine, parity, num, size, epochs, steps, world_size=world_size
    ):
        assert num_updates == len(want)
        for mine, wanted in zip(found, _plain(*want), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.sample(8)
@pytest.mark.parametrize("num_micro_steps", [4, 6, 8])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_batch_that_is_trained_ends_the_window(layout: tuple[int, str], loop: Loop, num_micro_steps: int) -> None:
    # That all batches of an epoch were fetched before, is known in the first epoch only: a list does not say where it ends.
    epochs = 1 if loop is all_fetched_ahead else 2
    want = _windows(num_micro_steps, epochs)
    _check(layout, loop, want, num=num_micro_steps, size=SIZE // layout[0], epochs=epochs)


@pytest.mark.parametrize("loop", [windows_of_copies, split_in_two])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_batches_and_copies_of_batches_are_counted(layout: tuple[int, str], loop: Loop) -> None:
    # A batch that is split has the samples of two micro-steps of its rank: the same windows, in another order.
    size = SIZE // layout[0] * (2 if loop is split_in_two else 1)
    _check(layout, loop, _windows(8), num=8, size=size)


def _refused(layout: tuple[int, str], loop: Loop, *args: Any) -> str:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_train, loop, layout[1], *args, world_size=layout[0])
    errors = [error for error in caught.value.errors.values() if isinstance(error, UsageError)]
    assert errors
    return str(errors[0])


_AHEAD = "several batches were fetched before the first of them is trained"
_AFTER_LAST = "accumulate() was entered again after the last batch of a loader"


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("layout", "loop", "arguments", "said"),
    [
        # parity, micro-steps, size of a batch, epochs, accumulation steps
        ((1, "single"), windows_of_copies, ("off", 4, SIZE, 1, 4), _AFTER_LAST),  # the whole pass
        ((1, "single"), split_in_two, ("off", 6, 2 * SIZE, 1, 4), "this pass has only 2 of 4 micro-steps"),
        ((2, "ddp"), one_fetched_ahead, ("exact", 4, 5, 1, 1), _AHEAD),  # an uneven division
        *(
            (layout, copies_of_all, ("exact", 1, layout[0], 1, 4), _AFTER_LAST)
            for layout in ((1, "single"), (2, "ddp"))
        ),
        *(  # a pass of fewer batches than a window
            (layout, windows_fetched_ahead, ("exact", num, SIZE, 1, steps), _AHEAD)
            for layout in ((1, "single"), (2, "ddp"))
            for num in (2, 3)
            for steps in (1, 4)
        ),
        *(  # updates of one micro-step: the weights may be right, but not update_loss() and the position of a checkpoint
            (layout, loop, ("exact", 6, SIZE, 1, 1), _AHEAD)
            for layout in ((1, "single"), (2, "ddp"), (2, "fsdp2"))
            for loop in (windows_fetched_ahead, one_fetched_ahead, all_fetched_ahead)
        ),
    ],
)
def test_batches_that_cannot_be_assigned_to_their_updates_are_refused(
    layout: tuple[int, str], loop: Loop, arguments: tuple[Any, ...], said: str
) -> None:
    assert said in _refused(layout, loop, *arguments)


@pytest.mark.sample(5)
@pytest.mark.parametrize("parity", ["exact", "bitwise"])
@pytest.mark.parametrize("loop", [windows_fetched_ahead, windows_of_known_size, one_fetched_ahead, windows_of_copies])
@pytest.mark.parametrize("layout", [(1, "single"), (2, "ddp"), (2, "fsdp2")])
def test_an_exact_update_of_micro_steps_that_were_fetched_ahead_is_refused(
    layout: tuple[int, str], loop: Loop, parity: str
) -> None:
    text = _refused(layout, loop, parity, 8, 4 * SIZE, 1, 4)
    if parity == "exact":
        assert _AHEAD in text


@pytest.mark.sample(3)
@pytest.mark.parametrize("loop", [looked_at_before, read_as_usual])
@pytest.mark.parametrize("num_micro_steps", [1, 6])
@pytest.mark.parametrize("layout", [(1, "single"), (2, "ddp"), (2, "fsdp2")])
def test_exact_updates_of_batches_that_are_trained_at_once_are_not_refused(
    layout: tuple[int, str], num_micro_steps: int, loop: Loop
) -> None:
    want = [*_data(num_micro_steps).split(SIZE)] * 2  # type: ignore[no-untyped-call]
    _check(layout, loop, want, num=num_micro_steps, size=SIZE, parity="exact")


def _one_batch(num_samples: int, count: bool, is_in_accumulate: bool = False) -> float:
    """Train one batch three times, as loops do to see whether a model can learn at all."""
    accelerator = Accelerator(cpu=True, parity="exact")
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(1, num_samples + 1, dtype=torch.float64)[:, None]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=num_samples))  # type: ignore[arg-type]
    x = next(iter(loader))
    for _ in range(3):
        loss = (model(x) - x).square().mean() / num_samples**2
        with accelerator.accumulate(model) if is_in_accumulate else nullcontext():
            accelerator.backward(loss, num_items=len(x) if count else None)
        optimizer.step()
        optimizer.zero_grad()
    return float(accelerator.unwrap_model(model).weight.item())


def _loss_of_one_batch() -> str:
    """Train a batch in its loop, so that there is a loss, and then another one outside."""
    accelerator = Accelerator(cpu=True, parity="exact")
    model = nn.Linear(1, 1).double()
    data = torch.ones(4, 1, dtype=torch.float64)
    model, loader = accelerator.prepare(model, DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    for x in loader:
        accelerator.backward(model(x).sum(), num_items=len(x))
        assert accelerator.update_loss() == pytest.approx(model(x).sum().item(), rel=1e-12)
    x = next(iter(loader))
    accelerator.backward(model(x).sum(), num_items=len(x))
    with pytest.raises(UsageError) as error:
        accelerator.update_loss()
    return str(error.value)


def test_the_loss_of_a_batch_outside_of_its_loop_is_not_known() -> None:
    for text in run_on_ranks(_loss_of_one_batch, world_size=1):
        assert "the latest one was trained outside of it" in text


def _one_batch_plainly(num_samples: int) -> float:
    x, weight = torch.arange(1, num_samples + 1, dtype=torch.float64), 0.0
    for _ in range(3):
        weight -= 0.1 * float((2 * (weight * x - x) * x).mean()) / num_samples**2
    return weight


@pytest.mark.parametrize("is_in_accumulate", [False, True])
@pytest.mark.parametrize(("num_samples", "count"), [(4, False), (4, True), (5, True)])
def test_one_batch_may_be_trained_outside_of_its_loop(num_samples: int, count: bool, is_in_accumulate: bool) -> None:
    for world_size in (1, 2):
        for found in run_on_ranks(_one_batch, num_samples, count, is_in_accumulate, world_size=world_size):
            assert found == pytest.approx(_one_batch_plainly(num_samples), rel=1e-12)  # float64, sums of 5 numbers


@pytest.mark.parametrize("is_in_accumulate", [False, True])
def test_one_uneven_batch_outside_of_its_loop_is_refused(is_in_accumulate: bool) -> None:
    """3 + 2 samples: without numbers of items, the ranks' means would have equal weights."""
    with pytest.raises(
        RanksFailed, match="different numbers of samples of a batch that is trained outside of its loader's loop"
    ):
        run_on_ranks(_one_batch, 5, False, is_in_accumulate, world_size=2)
