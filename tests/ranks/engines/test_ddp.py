"""A prepared model on two ranks is torch's DistributedDataParallel, with the gradients and weights of a loop with DDP by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon import Accelerator
from echelon.utils import DistributedDataParallelKwargs
from tests.harness import run_on_ranks

WIDTH = 384  # a MiB of gradients


class _Branches(nn.Module):
    """Has dropout, and a layer that only some passes use, the same ones on both ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.sometimes = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        x = nn.functional.dropout(torch.tanh(self.first(x)), 0.2)
        return self.second(x + self.sometimes(x) if uses_all else x)  # type: ignore[no-any-return]


def _every_pass(number: int) -> dict[str, Any]:
    return {}


def _every_other_pass(number: int) -> dict[str, Any]:
    return {"uses_all": number % 2 == 0}


LOOPS: dict[str, tuple[Callable[[int], dict[str, Any]], int, dict[str, Any]]] = {
    "plain": (_every_pass, 1, {}),
    "several buckets": (_every_pass, 1, {"bucket_cap_mb": 0.3}),
    "static graph": (_every_pass, 1, {"static_graph": True}),
    "unused layers": (_every_other_pass, 1, {"find_unused_parameters": True}),
    "two passes before each step": (_every_pass, 2, {}),
}
"""The arguments of each pass, the backward passes per step, and the options of DDP."""


def _train(name: str, wrapper: Any, optimizer: Any, backward: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """Return the gradients of each step and the weights at the end."""
    arguments, num_passes, _ = LOOPS[name]
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    seen: list[torch.Tensor] = []
    for number in range(6):
        torch.manual_seed(100 * number + dist.get_rank())  # dropout
        backward(wrapper(torch.randn(5, WIDTH, generator=draw), **arguments(number)).square().mean())
        if number % num_passes == num_passes - 1:
            seen += [torch.full((), -7.0) if p.grad is None else p.grad.clone() for p in wrapper.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return seen + [p.detach().clone() for p in wrapper.parameters()]


def _both() -> dict[str, tuple[bool, list[torch.Tensor], list[torch.Tensor]]]:
    found = {}
    for name, (_, _, options) in LOOPS.items():
        bare = _Branches()
        by_hand = DistributedDataParallel(bare, **options)
        optimizer: Any = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
        expected = _train(name, by_hand, optimizer, torch.Tensor.backward)
        bare = _Branches()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9))
        found[name] = (
            type(model) is DistributedDataParallel,
            expected,
            _train(name, model, optimizer, accelerator.backward),
        )
        accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def loops() -> list[dict[str, tuple[bool, list[torch.Tensor], list[torch.Tensor]]]]:
    return run_on_ranks(_both, world_size=2)


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_and_weights_are_those_of_ddp_by_hand(name: str, loops: Any) -> None:
    for rank in range(2):
        is_torchs, expected, own = loops[rank][name]
        assert is_torchs
        assert len(own) == len(expected)
        assert all(map(torch.equal, own, expected))  # the same operations, so not one bit differs
    assert all(map(torch.equal, loops[0][name][2], loops[1][name][2]))
