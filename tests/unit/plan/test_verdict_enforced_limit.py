"""Verdicts on drawn steps are those of real steps whose allocator refuses what exceeds a number of bytes."""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.engines.activation_checkpointing import checkpoint_activations
from echelon.plan.facts import Cluster, ModelFacts, ParallelLayout, StepSettings, StepTrace
from echelon.plan.layouts import plan_layout
from echelon.plan.trace import trace_step
from echelon.plan.verdict import Reserve, Traces, judge

NOTHING_ELSE = Reserve(context=0, communicator=0, share=0.03)  # what acceptance allows a trace to be below


class Refused(Exception):
    """The allocator has no more bytes."""


class LimitedAllocator(TorchDispatchMode):
    """Counts the bytes of storages while they live, each rounded up to 512, and refuses more than ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.live = limit, 0
        self._known: set[int] = set()

    def hold(self, tensors: Iterator[Any]) -> None:
        for one in tensors:
            if not isinstance(one, torch.Tensor):
                continue
            storage = one.untyped_storage()
            if id(storage) not in self._known:
                size = -(-storage.nbytes() // 512) * 512
                self._known.add(id(storage))
                self.live += size
                weakref.finalize(storage, self._free, id(storage), size)
                if self.live > self.limit:
                    raise Refused

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(iter(out if isinstance(out, (tuple, list)) else (out,)))
        return out


class Block(nn.Module):
    def __init__(self, width: int, *, is_attention: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.attention = nn.Linear(width, 3 * width) if is_attention else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None:
            q, k, v = self.attention(self.norm(x)).unsqueeze(1).chunk(3, -1)
            x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


class Drawn(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(
        self, *, vocabulary: int, width: int, blocks: int, tied: bool, frozen: bool, is_attention: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width).requires_grad_(not frozen)
        self.blocks = nn.ModuleList(Block(width, is_attention=is_attention) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Convolutions(nn.Module):
    _no_split_modules = ()

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [3, *[width] * layers]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in itertools.pairwise(sizes)
            )
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images).mean((2, 3)))


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    settings: StepSettings
    accumulation: int
    share: float
    """The limit as a multiple of the model's bytes."""


def draw(seed: int) -> Case:
    own = random.Random(seed)
    micro_batch = own.choice((1, 2, 3, 6))
    mode = "none"
    if own.random() < 0.3:
        width, layers, size = own.choice((8, 17, 32)), own.randint(1, 4), own.choice((8, 15, 24))

        def build() -> nn.Module:
            return Convolutions(width, layers)

        def batch() -> dict[str, torch.Tensor]:
            return {"x": torch.randn(micro_batch, 3, size, size), "y": torch.zeros(micro_batch, dtype=torch.int64)}
    else:
        shape = {
            "vocabulary": own.choice((50, 301, 1024)),
            "width": own.choice((32, 48, 100)),
            "blocks": own.randint(1, 4),
            "tied": own.random() < 0.3,
            "is_attention": own.random() < 0.5,
        }
        frozen, tokens = own.random() < 0.2 and not shape["tied"], own.choice((16, 65, 128))
        mode = own.choice(("none", "none", "full"))

        def build() -> nn.Module:
            return Drawn(frozen=frozen, **shape)  # type: ignore[arg-type]

        def batch() -> dict[str, torch.Tensor]:
            ids = torch.zeros(micro_batch, tokens, dtype=torch.int64)
            return {"x": ids, "y": ids.clone()}

    optimizers: list[Callable[[Any], torch.optim.Optimizer]] = [
        torch.optim.AdamW,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ]
    settings = StepSettings(micro_batch, own.choice(("no", "bf16")), activation_checkpointing=mode)
    return Case(build, batch, own.choice(optimizers), settings, own.choice((1, 1, 2)), math.exp(own.uniform(0.5, 4.5)))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["x"])
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["y"].flatten())


def runs(case: Case, limit: int) -> bool:
    """Return whether a second step of a plain loop, when the optimizer has its state, stays below ``limit``."""
    torch.manual_seed(0)
    model = case.build()
    if case.settings.activation_checkpointing != "none":
        checkpoint_activations(list(model.blocks), case.settings.activation_checkpointing, where="")  # type: ignore[arg-type]
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    batch = case.batch()

    def step() -> None:
        for _ in range(case.accumulation):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.settings.mixed_precision == "bf16"):
                loss = loss_of(model, batch)
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    allocator = LimitedAllocator(limit)
    try:
        allocator.hold(iter([*model.parameters(), *model.buffers(), *states, *batch.values()]))
        with allocator:
            step()
    except Refused:
        return False
    return True


class _Source:
    can_chunk_loss = False

    def __init__(self, case: Case) -> None:
        self.case, self._module = case, case.build()
        self.model: ModelFacts = None  # type: ignore[assignment]

    def trace(self, settings: StepSettings) -> StepTrace:
        blocks = ("Block",) if settings.activation_checkpointing != "none" else ()
        self.model, trace = trace_step(
            self._module, self.case.optimizer, loss_of, self.case.batch(), settings, blocks=blocks, device="cpu"
        )
        return trace


def is_said_to_fit(case: Case, limit: int) -> bool:
    layout = ParallelLayout("single", case.settings, accumulation=case.accumulation)
    cluster = Cluster(gpus_per_node=1, nodes=1, gpu_memory=limit)
    traces = Traces(_Source(case))
    return judge(traces, layout, cluster, plan_layout, NOTHING_ELSE).fits


def check(seeds: range) -> tuple[list[int], list[int]]:
    """Return the seeds of wrong verdicts, and of those that said that a step fits which does not."""
    wrong, unsafe = [], []
    for seed in seeds:
        case = draw(seed)
        limit = round(case.share * sum(p.numel() * p.element_size() for p in case.build().parameters()))
        said, is_true = is_said_to_fit(case, limit), runs(case, limit)
        if said != is_true:
            wrong.append(seed)
        if said and not is_true:
            unsafe.append(seed)
    return wrong, unsafe


def test_a_few_verdicts_are_right() -> None:
    assert check(range(4)) == ([], [])


@pytest.mark.soak
def test_of_500_verdicts_98_percent_are_right_and_none_says_fits_wrongly() -> None:
    wrong, unsafe = check(range(500))
    assert unsafe == []
    assert len(wrong) <= 10, wrong
