"""One PyTorch training script, three levels of abstraction, any number of ranks, provably the same run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from echelon._version import __version__

if TYPE_CHECKING:
    from echelon import distributed
    from echelon.base.errors import EchelonError
    from echelon.world.seed import set_seed
    from echelon.world.world import World

__all__ = ["EchelonError", "World", "__version__", "distributed", "set_seed"]

# Public name -> module that holds it ("" = the name is itself a module). Loaded on first use (PEP 562): `import echelon`
# costs milliseconds, and `echelon --help` never pays for torch.
_LAZY = {
    "EchelonError": "echelon.base.errors",
    "World": "echelon.world.world",
    "distributed": "",
    "set_seed": "echelon.world.seed",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    module = _LAZY[name]
    value: object = getattr(import_module(module), name) if module else import_module(f"echelon.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
