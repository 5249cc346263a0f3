"""Small models for the tests of ``plan/``, drawn by a seed, and the facts of a model that a plan is computed from."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.accelerator.master_weights import LOW_PRECISION, MasterWeights
from echelon.plan.facts import ModelFacts, ParameterFacts, TensorFacts


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x.to(self.down.weight.dtype)))
        return out


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, *, has_buffer: bool, has_scale: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(())) if has_scale else None
        if has_buffer:
            self.register_buffer("offset", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        if self.scale is not None:
            out = out * self.scale
        return x + out


class DrawnModel(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(
        self, *, vocabulary: int, width: int, hidden: int, num_blocks: int, tied: bool, **of_blocks: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, **of_blocks) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a seed has drawn: a model, and how it is trained."""

    engine: str
    world_size: int
    replicas: int
    stage: int
    cpu_offload: bool
    mixed_precision: str
    master_weights: str
    accumulation: int
    build: Any
    """Returns the model and the optimizer, the same in every process."""


def draw(seed: int, *, max_world_size: int = 8) -> Drawn:
    """Return the configuration of ``seed``."""
    rng = random.Random(seed)
    engine = rng.choice(["ddp", "zero1", "fsdp2", "fsdp2", "fsdp2"])
    world_size = rng.randint(1, max_world_size)
    divisors = [n for n in range(1, world_size) if world_size % n == 0] or [1]
    mixed = rng.choice(["no", "bf16"])
    low = rng.random() < 0.4
    sizes: dict[str, Any] = {
        "vocabulary": rng.randint(3, 40),
        "width": rng.randint(1, 19),
        "hidden": rng.randint(1, 33),
        "num_blocks": rng.randint(1, 4),
        "tied": rng.random() < 0.4,
        "has_buffer": rng.random() < 0.4,
        "has_scale": rng.random() < 0.2 and not low,
    }
    frozen = rng.choice(["", "", "embedding", "norms", "lora", "lora"])
    kind = rng.choice(["adamw", "adamw", "sgd", "momentum", "amsgrad", "adagrad"])
    groups, holds_frozen = rng.choice([1, 2]), rng.random() < 0.5

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: Any = DrawnModel(**sizes)
        if low:
            model.to(torch.bfloat16)
        if frozen == "embedding" and not sizes["tied"]:
            model.embedding.requires_grad_(False)
        elif frozen == "norms":
            for block in model.blocks:
                block.norm.requires_grad_(False)
        elif frozen == "lora":
            model.requires_grad_(False)
            for block in model.blocks:
                block.up, block.down = (
                    LoRALinear(block.up, 3).to(block.up.weight.dtype),
                    LoRALinear(block.down, 2).to(block.up.weight.dtype),
                )
        return model, _optimizer(kind, model, groups, holds_frozen=holds_frozen)

    return Drawn(
        engine=engine,
        world_size=world_size,
        replicas=rng.choice(divisors) if engine == "fsdp2" and rng.random() < 0.3 else 1,
        stage=rng.choice([2, 3]) if engine == "fsdp2" else 3,
        cpu_offload=engine == "fsdp2" and rng.random() < 0.2,
        mixed_precision=mixed,
        master_weights=rng.choice(["float32", "keep"]) if mixed == "bf16" else "keep",
        accumulation=rng.choice([1, 1, 2]),
        build=build,
    )


def _optimizer(kind: str, model: nn.Module, groups: int, *, holds_frozen: bool) -> torch.optim.Optimizer:
    held = [p for p in model.parameters() if p.requires_grad or holds_frozen]
    parts: Any = [{"params": held}]
    if groups == 2:
        vectors = [p for p in held if p.dim() < 2]
        parts = [{"params": [p for p in held if p.dim() >= 2]}, {"params": vectors, "weight_decay": 0.0}]
        parts = [part for part in parts if part["params"]]
    makers: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "momentum": lambda parts: torch.optim.SGD(parts, momentum=0.9),
        "amsgrad": lambda parts: torch.optim.Adam(parts, amsgrad=True),
        "adagrad": torch.optim.Adagrad,
    }
    made: torch.optim.Optimizer = makers[kind](parts)
    return made


# ---- facts ---------------------------------------------------------------------------------------------------------------


def facts_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> ModelFacts:
    """Return the facts of ``model``, whose blocks are its ``_no_split_modules``. A copy of ``optimizer`` steps once."""
    names = tuple(getattr(model, "_no_split_modules", None) or ())
    units = tuple(name for name, module in model.named_modules() if type(module).__name__ in names)
    aliases: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    groups = (
        {}
        if optimizer is None
        else {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    )
    states = {} if optimizer is None else _states(model, optimizer)
    followers = set(_followers(model))
    return ModelFacts(
        parameters=tuple(
            ParameterFacts(
                name=name,
                tensor=_tensor(p, follows=name in followers),
                is_trainable=p.requires_grad,
                unit=next((unit for unit in units if name.startswith(f"{unit}.")), ""),
                state=states.get(name, ()),
                other_names=tuple(other for other in aliases[id(p)] if other != name),
                group=groups.get(id(p)),
            )
            for name, p in model.named_parameters()
        ),
        buffers=tuple(_tensor(b, follows=name in followers) for name, b in model.named_buffers()),
        units=units,
        class_name=type(model).__name__,
        **more,
    )


def _tensor(tensor: torch.Tensor, *, follows: bool = False) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), follows_masters=follows)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[TensorFacts, ...]]:
    copied, stepped = copy.deepcopy((model, optimizer))
    for p in copied.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    stepped.step()
    return {
        name: tuple(_tensor(value) for value in stepped.state.get(p, {}).values() if isinstance(value, torch.Tensor))
        for name, p in copied.named_parameters()
    }


def _followers(model: nn.Module) -> Iterator[str]:
    """Yield the frozen parameters and the buffers that float32 master weights cast, too."""
    copied = copy.deepcopy(model)
    MasterWeights().cast(copied, [])
    after = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.requires_grad and tensor.dtype in LOW_PRECISION and after[name].dtype is torch.float32:
            yield name
