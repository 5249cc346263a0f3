"""Weights of the next modules are loaded while the current one runs: which, how much, and never stale ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import disk_offload
from echelon.base.warnings import EchelonWarning
from echelon.big_models.align_devices import attach_align_device_hook
from echelon.big_models.offload_store import OffloadedWeightsLoader
from echelon.big_models.prefetch import Prefetcher, Prefetchers


class OneDevice(Prefetchers):
    """Copies weights in the thread although the device is the CPU."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher

    def of(self, device: Any) -> Prefetcher:
        return self.prefetcher


class Weights(dict[str, torch.Tensor]):
    """Weights that record which names are read."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__(values)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return super().__getitem__(name)


@contextmanager
def _chain(sizes: list[int]) -> Iterator[tuple[nn.Sequential, Weights, Prefetcher]]:
    """Layers without biases, whose weights are loaded ahead."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(sizes[i], sizes[i + 1], bias=False) for i in range(len(sizes) - 1)])
    weights = Weights({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    with closing(Prefetcher("cpu", copies=True)) as prefetcher:
        attach_align_device_hook(
            model, torch.device("cpu"), offload=True, weights_map=weights, prefetchers=OneDevice(prefetcher)
        )
        yield model, weights, prefetcher


def _product(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    for tensor in weights.values():
        x = x @ tensor.T
    return x


def test_each_weight_is_read_once_per_pass_and_results_are_exact() -> None:
    with _chain([3, 4, 5, 4]) as (model, weights, _):
        x = torch.randn(2, 3)
        for _ in range(3):
            weights.read.clear()
            with torch.no_grad():
                assert torch.equal(model(x), _product(weights, x))
            assert sorted(set(weights.read)) == ["0.weight", "1.weight", "2.weight"]


def test_the_next_weights_are_requested_while_a_module_runs() -> None:
    with _chain([3, 4, 5, 4]) as (model, _, prefetcher):
        ahead: list[int] = []
        original = prefetcher.load_ahead

        def record(hook: Any) -> None:
            original(hook)
            for future in prefetcher._pending.values():
                future.result()
            ahead.append(len(prefetcher._pending))

        prefetcher.load_ahead = record  # type: ignore[method-assign]
        with torch.no_grad():
            model(torch.randn(2, 3))
        # The second and third weights have 20 numbers each, as many as the largest; so one of them is loaded ahead.
        assert ahead == [1, 1, 0]
        ahead.clear()
        with torch.no_grad():
            model(torch.randn(2, 3))
        assert ahead == [1, 1, 0]  # nothing waits between two passes


def test_the_order_is_that_of_the_last_pass() -> None:
    with _chain([3, 3, 3, 3]) as (model, weights, prefetcher):
        x = torch.randn(2, 3)
        with torch.no_grad():
            for _ in range(2):
                found = model[0](model[2](model[1](x)))
        expected = x @ weights["1.weight"].T @ weights["2.weight"].T @ weights["0.weight"].T
        assert torch.equal(found, expected)
        assert list(prefetcher._next(model[2]._hf_hook)) == [model[0]._hf_hook]
        with torch.no_grad():  # a module that runs twice
            assert torch.equal(model[1](model[1](x)), x @ weights["1.weight"].T @ weights["1.weight"].T)


def test_weights_that_changed_after_they_were_loaded_are_read_again() -> None:
    with _chain([3, 3, 3]) as (model, weights, prefetcher):
        x = torch.randn(2, 3)
        with torch.no_grad():
            hidden = model[0](x)
            next(iter(prefetcher._pending.values())).result()
            dict.__getitem__(weights, "1.weight").zero_()  # in place
            assert model[1](hidden).count_nonzero() == 0
            hidden = model[0](x)
            next(iter(prefetcher._pending.values())).result()
            weights["1.weight"] = torch.ones(3, 3)  # replaced
            assert torch.equal(model[1](hidden), torch.nn.functional.linear(hidden, torch.ones(3, 3)))
            hidden = model[0](x)
            model[1]._hf_hook.weights_map = {"weight": torch.zeros(3, 3)}  # as peft does after merging
            assert model[1](hidden).count_nonzero() == 0


def test_without_memory_for_more_weights_each_module_loads_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with _chain([3, 4, 5]) as (model, weights, prefetcher):

        def fail(*_: object) -> Any:
            raise torch.OutOfMemoryError("out of memory")

        monkeypatch.setattr(prefetcher, "_load", fail)
        x = torch.randn(2, 3)
        with torch.no_grad(), pytest.warns(EchelonWarning, match="cpu has no memory left to load weights in advance"):
            assert torch.equal(model(x), _product(weights, x))
        with torch.no_grad():
            assert torch.equal(model(x), _product(weights, x))


def test_an_error_while_reading_is_raised_where_the_weight_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with _chain([3, 4, 5]) as (model, weights, _):
        del weights["1.weight"]
        with torch.no_grad():
            hidden = model[0](torch.randn(2, 3))
            with pytest.raises(KeyError, match=r"1\.weight"):
                model[1](hidden)


def test_on_the_cpu_the_system_is_asked_to_read_the_next_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    original = OffloadedWeightsLoader.read_ahead
    monkeypatch.setattr(
        OffloadedWeightsLoader, "read_ahead", lambda self, name: (asked.append(name), original(self, name))
    )
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    expected = model(torch.ones(2))
    disk_offload(model, tmp_path)
    for _ in range(2):
        assert torch.equal(model(torch.ones(2)), expected)
    layer = [f"{number}.{name}" for number in (1, 2) for name in ("weight", "bias")]
    assert asked == layer * 2
