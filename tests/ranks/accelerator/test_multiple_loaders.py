"""Several training loaders in one loop, and loops of other shapes, under ``parity="exact"``: a plain loop's weights, or an error."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.reference import regression_data, tanh_net

Step = Callable[..., None]
"""Takes batches, and makes a step with the sum of their mean losses."""


def _model() -> nn.Module:
    return tanh_net(3, 4, 2, seed=5)


def _loaders(sizes: tuple[int, int, int, int]) -> tuple[DataLoader[Any], ...]:
    n_a, n_b, size_a, size_b = sizes
    data = [regression_data(n, 3, 2, seed=seed) for seed, n in enumerate((n_a, n_b, 5))]
    return tuple(map(DataLoader, data, (size_a, size_b, 2)))


def _zip(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one, two in zip(a, b):
        step(one, two)


def _zip_of_three(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one, two in itertools.islice(zip(_as_is(a), b), 3):
        step(one, two)


def _three_and_all(a: Any, _b: Any, _c: Any, step: Step) -> None:
    for one in itertools.islice(a, 3):
        step(one)
    for one in a:
        step(one)


def _as_is(loader: Any) -> Iterator[Any]:
    yield from loader


def _by_hand(a: Any, b: Any, _c: Any, step: Step) -> None:
    beside = iter(b)
    for one in a:
        two = next(beside, None)
        if two is None:
            break
        step(one, two)


def _cycle(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one, two in zip(a, itertools.cycle(b)):
        step(one, two)


def _nested(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one in a:
        for two in b:
            step(two)
        step(one)


def _nested_after(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one in a:
        step(one)
        for two in b:
            step(two)


def _alternating(a: Any, b: Any, _c: Any, step: Step) -> None:
    beside = iter(b)
    for one in a:
        step(one)
        two = next(beside, None)
        if two is not None:
            step(two)


def _evaluation_inside(a: Any, b: Any, c: Any, step: Step) -> None:
    held = iter(c)
    for one, two in zip(a, b):
        with torch.no_grad():
            next(held, None)  # an occasional validation batch
        step(one, two)
        with torch.no_grad():
            for _ in c:
                pass


def _again(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one, two in zip(a, b):
        step(one, two)
    for one in a:
        step(one)
    for two in b:
        step(two)


def _left(a: Any, _b: Any, _c: Any, step: Step) -> None:
    """Start a pass, read a batch, and leave it; the next pass is complete."""
    first = iter(a)
    next(first)
    del first
    for one in a:
        step(one)


def _zip_left(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one, two in zip(a, b):
        step(one, two)
        break


def _first_of_another(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one in a:
        step(one, next(iter(b)))


def _nested_left(a: Any, b: Any, _c: Any, step: Step) -> None:
    for one in a:
        for two in b:
            step(two)
            break
        step(one)


def _plain(program: str, sizes: tuple[int, int, int, int]) -> tuple[dict[str, torch.Tensor], int]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    num_steps = 0

    def step(*batches: Any) -> None:
        nonlocal num_steps
        optimizer.zero_grad()
        loss: Any = sum((model(x) - y).square().mean() for x, y in batches)
        loss.backward()
        optimizer.step()
        num_steps += 1

    globals()[program](*_loaders(sizes), step)
    return dict(model.state_dict()), num_steps


def _run(program: str, sizes: tuple[int, int, int, int], settings: dict[str, Any]) -> Any:
    accelerator = Accelerator(cpu=True, **{"parity": "exact", **settings})
    model: Any = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *_loaders(sizes))

    def step(*batches: Any) -> None:
        with accelerator.accumulate(model):
            loss: Any = sum((model(x) - y).square().mean() for x, y in batches)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", EchelonWarning)
        try:
            globals()[program](*loaders, step)
        except UsageError as error:
            return str(error)
    return accelerator.get_state_dict(model), accelerator.progress.step, [str(one.message) for one in said]


_SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "whole": ({}, 1),
    "max_micro_batch_size": ({"max_micro_batch_size": 2}, 1),
    "ranks": ({}, 2),
    "ranks and accumulation": ({"gradient_accumulation_steps": 2}, 2),
}
_BITWISE: dict[str, tuple[dict[str, Any], int]] = {
    "bitwise, a shard each": ({"parity": "bitwise", "seed": 0, "canonical_shards": 2}, 2),
}


def _check(program: str, sizes: tuple[int, int, int, int], setting: str, refused: str = "") -> None:
    settings, world_size = (_SETTINGS | _BITWISE)[setting]
    weights, num_steps = _plain(program, sizes)
    for found in run_on_ranks(_run, program, sizes, settings, world_size=world_size):
        if isinstance(found, str):
            assert refused, found
            assert refused in found
            assert "do:" in found
            continue
        assert not refused, "nothing was refused"
        mine, mine_steps, said = found
        assert said == []
        assert mine_steps == num_steps
        for name, value in weights.items():  # float64, sums in another order
            assert (mine[name] - value).norm() <= 1e-12 * value.norm(), name


_EVEN = (16, 16, 4, 4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("setting", _SETTINGS)
@pytest.mark.parametrize("program", ["_zip", "_by_hand", "_evaluation_inside", "_again", "_left"])
def test_loaders_of_equal_batches_may_be_read_together(program: str, setting: str) -> None:
    _check(program, _EVEN, setting)


@pytest.mark.sample(3)
@pytest.mark.parametrize("setting", _SETTINGS)
@pytest.mark.parametrize("sizes", [(32, 16, 8, 4), (16, 24, 4, 4), (24, 12, 8, 4)], ids=str)
def test_loaders_of_different_batch_sizes_and_lengths_are_split_alike(
    sizes: tuple[int, int, int, int], setting: str
) -> None:
    """Twice the batch size with the same number of micro-batches; the longer loader stops where the shorter one ends."""
    _check("_zip", sizes, setting)


@pytest.mark.parametrize("setting", _SETTINGS)
def test_a_shorter_loader_may_be_cycled(setting: str) -> None:
    _check("_cycle", (24, 8, 4, 4), setting)


@pytest.mark.sample(3)
@pytest.mark.parametrize("setting", ["whole", "ranks"])
@pytest.mark.parametrize("sizes", [_EVEN, (10, 7, 4, 3)], ids=["even", "ragged"])
@pytest.mark.parametrize("program", ["_nested", "_nested_after", "_alternating"])
def test_loaders_may_alternate_if_an_update_is_one_micro_step(
    program: str, sizes: tuple[int, int, int, int], setting: str
) -> None:
    _check(program, sizes, setting)


_PIECES = "do not match"
_WITHIN = "in the middle of another loader's update"


@pytest.mark.parametrize(
    ("program", "sizes", "setting", "text"),
    [
        ("_zip", (16, 24, 4, 6), "max_micro_batch_size", _PIECES),  # micro-batches of 2 + 2, and of 2 + 2 + 2
        ("_zip", (15, 16, 4, 4), "max_micro_batch_size", _PIECES),  # an uneven end: 2 + 1, and 2 + 2
        ("_zip", (15, 16, 4, 4), "ranks", _PIECES),
        ("_zip", (24, 16, 6, 4), "ranks and accumulation", _PIECES),
        ("_nested", _EVEN, "max_micro_batch_size", _WITHIN),
        (
            "_zip",
            (28, 14, 8, 4),
            "ranks and accumulation",
            _PIECES,
        ),  # two samples cannot be split into two micro-batches for two ranks
        ("_zip", (16, 15, 4, 4), "ranks", _PIECES),
        ("_nested", (10, 7, 4, 3), "ranks and accumulation", "Nested loops require one micro-step per update"),
        ("_nested_after", _EVEN, "max_micro_batch_size", _WITHIN),
        ("_nested_after", _EVEN, "ranks and accumulation", _WITHIN),
        ("_alternating", _EVEN, "max_micro_batch_size", _WITHIN),
        (
            "_nested",
            _EVEN,
            "bitwise, a shard each",
            "with fewer processes, a nested loop would run several times",
        ),
    ],
)
def test_undefined_loops_are_rejected_by_name(
    program: str, sizes: tuple[int, int, int, int], setting: str, text: str
) -> None:
    _check(program, sizes, setting, text)


@pytest.mark.parametrize("setting", ["whole", "ranks"])
def test_iterations_of_one_micro_step_are_updates(setting: str) -> None:
    _check("_zip_of_three", _EVEN, setting)


def test_leaving_a_loop_within_an_update_is_reported() -> None:
    """``islice(loader, 3)`` are three micro-steps: an update and a half."""
    found = _run("_three_and_all", _EVEN, {"max_micro_batch_size": 2})
    assert not isinstance(found, str), found
    _, num_steps, said = found
    assert num_steps == 1 + 4
    assert any("ended in the middle of an update with several micro-steps" in text for text in said), said


def test_a_cycled_loader_with_mismatched_batches_is_reported() -> None:
    """Its batches then come from a list, so their update is unknown."""
    found = _run("_cycle", (14, 8, 4, 4), {"max_micro_batch_size": 2})
    assert not isinstance(found, str), found
    assert any("itertools.cycle" in text for text in found[2]), found[2]


@pytest.mark.parametrize(
    ("program", "sizes", "setting"),
    [
        ("_zip_left", (16, 12, 4, 3), "ranks"),
        ("_first_of_another", (16, 12, 4, 3), "ranks"),
        (
            "_first_of_another",
            _EVEN,
            "max_micro_batch_size",
        ),  # the first micro-batch of the other loader, with the second one
    ],
)
def test_an_abandoned_batch_of_another_loader_with_other_micro_batches_is_reported(
    program: str, sizes: tuple[int, int, int, int], setting: str
) -> None:
    """Nobody can say whether the loss was of both, for the loader beside ended before it was read again."""
    settings, world_size = _SETTINGS[setting]
    found = run_on_ranks(_run, program, sizes, settings, world_size=world_size)[0]
    assert not isinstance(found, str), found
    assert sum(_PIECES in text for text in found[2]) == 1, found[2]


@pytest.mark.parametrize("setting", ["whole", "ranks"])
@pytest.mark.parametrize("program", ["_zip_left", "_first_of_another"])
def test_an_abandoned_batch_of_another_loader_with_equal_micro_batches_is_accepted(program: str, setting: str) -> None:
    _check(program, _EVEN, setting)


def test_a_loop_within_a_loop_may_be_left() -> None:
    _check("_nested_left", (10, 7, 4, 3), "ranks")
