"""Functions that torch.compile calls, but does not compile."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from echelon import Accelerator
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.distributed.uncompiled import uncompiled, uncompiled_generator, uncompiled_methods

# torch's own warning, when it compiles for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

compiled: list[bool] = []


def _inner(x: torch.Tensor) -> torch.Tensor:
    compiled.append(torch.compiler.is_compiling())
    return x + 1


@uncompiled
def _outer(x: torch.Tensor) -> torch.Tensor:
    return _inner(x) * 2


@uncompiled
@contextlib.contextmanager
def _context() -> Iterator[None]:
    _inner(torch.ones(1))
    yield
    _inner(torch.ones(1))


@uncompiled_generator
def _items() -> Iterator[float]:
    for value in (1.0, 2.0):
        _inner(torch.ones(1))
        yield value


class _Methods:
    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return _inner(x)

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return _inner(x)

    def traced(self, x: torch.Tensor) -> torch.Tensor:
        return _inner(x)

    def _private(self, x: torch.Tensor) -> torch.Tensor:
        return _inner(x)


_Marked: Any = uncompiled_methods(but=("traced",))(_Methods)


def _compile(function: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # also of other tests
    compiled.clear()
    return torch.compile(function, backend="eager")


def test_a_marked_function_runs_uncompiled_between_two_graphs() -> None:
    step = _compile(lambda x: _outer(x.sin()).cos())
    for _ in range(3):
        torch.testing.assert_close(step(torch.ones(2)), ((torch.ones(2).sin() + 1) * 2).cos())
    assert compiled == [False] * 3  # traced once, the list would not have three entries
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert _outer.__name__ == "_outer"


def test_a_marked_context_runs_uncompiled() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with _context():
            return x.sin()

    _compile(step)(torch.ones(2))
    assert compiled == [False] * 2


def test_a_marked_generator_runs_uncompiled_and_stops_with_the_loop() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        total = x
        for value in _items():
            total = total + value * x
        return total

    compile_step = _compile(step)
    for count in (1, 2):
        assert compile_step(torch.ones(1)).item() == 4
        assert compiled == [False] * 2 * count
    assert inspect.isgenerator(_items())  # nothing between a loop and the generator


def test_a_marked_generator_that_was_started_outside_runs_uncompiled() -> None:
    items = iter(_items())
    step = _compile(lambda x: next(items) * x)
    assert [step(torch.ones(1)).item() for _ in range(2)] == [1, 2]
    assert compiled == [False] * 2

    def first() -> float:
        own = iter(_items())
        value = next(own)
        own.close()  # type: ignore[attr-defined]
        return value

    assert _compile(first)() == 1
    assert compiled == [False]


@pytest.mark.parametrize(
    ("name", "expected"), [("method", False), ("static", False), ("traced", True), ("_private", True)]
)
def test_public_methods_are_marked(name: str, expected: bool) -> None:
    step = _compile(lambda x: getattr(_Marked(), name)(x.sin()))
    step(torch.ones(2))
    assert compiled == [expected]


def test_every_public_method_of_the_accelerator_is_marked_but_autocast() -> None:
    for owner, but in ((Accelerator, {"autocast"}), (AcceleratedOptimizer, set()), (AcceleratedScheduler, set())):
        methods = {
            name
            for name, value in vars(owner).items()
            if name[0] != "_" and callable(getattr(value, "__func__", value))
        }
        unmarked = {name for name in methods if not hasattr(getattr(owner, name), "_torchdynamo_disable")}
        assert len(methods) > 5 or owner is AcceleratedScheduler
        assert unmarked == but
    accelerator = Accelerator(cpu=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        with accelerator.autocast():
            return x.sin()

    torch._dynamo.reset()
    torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2))
