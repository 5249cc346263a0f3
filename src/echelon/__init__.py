"""One PyTorch training script, three levels of abstraction, any number of ranks, provably the same run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from echelon._version import __version__

if TYPE_CHECKING:
    from echelon import distributed
    from echelon.accelerator import (
        Accelerator,
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        DistributedType,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        PartialState,
    )
    from echelon.base.errors import EchelonError
    from echelon.world.seed import set_seed
    from echelon.world.world import World

# Public name -> module that holds it ("" = the name is itself a module). Loaded on first use (PEP 562): `import echelon`
# costs milliseconds, and `echelon --help` never pays for torch.
_LAZY = {
    "Accelerator": "echelon.accelerator",
    "AutocastKwargs": "echelon.accelerator",
    "DataLoaderConfiguration": "echelon.accelerator",
    "DistributedDataParallelKwargs": "echelon.accelerator",
    "DistributedType": "echelon.accelerator",
    "EchelonError": "echelon.base.errors",
    "GradScalerKwargs": "echelon.accelerator",
    "GradientAccumulationPlugin": "echelon.accelerator",
    "InitProcessGroupKwargs": "echelon.accelerator",
    "PartialState": "echelon.accelerator",
    "World": "echelon.world.world",
    "distributed": "",
    "set_seed": "echelon.world.seed",
}

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "EchelonError",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "PartialState",
    "World",
    "__version__",
    "distributed",
    "set_seed",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    module = _LAZY[name]
    value: object = getattr(import_module(module), name) if module else import_module(f"echelon.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
