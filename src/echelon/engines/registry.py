"""Engine name -> class, imported when it is chosen; third parties add theirs by the entry point ``echelon.engines``."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points

from echelon.base.errors import ConfigError
from echelon.compat.unsupported import TPU_ALTERNATIVE
from echelon.engines.base import Engine

__all__ = ["BY_DEEPSPEED", "ENGINES", "GROUPLESS", "ON_ALL_DEVICES", "SHARDING", "choose", "load"]

ENGINES = {
    "single": "echelon.engines.single:SingleEngine",
    "dp": "echelon.engines.dp:DPEngine",
    "ddp": "echelon.engines.ddp:DDPEngine",
    "zero1": "echelon.engines.zero1:Zero1Engine",
    "fsdp2": "echelon.engines.fsdp.fsdp2:FSDP2Engine",
    "deepspeed": "echelon.engines.deepspeed.engine:DeepSpeedEngine",
}


# What TPUs are asked for by.
_TPU = frozenset({"tpu", "xla", "torch_xla", "torchxla"})

# Those that need no process group; in a lone process the others get one of one rank.
GROUPLESS = frozenset({"single", "dp"})

# Those of one process that run on every device that it sees.
ON_ALL_DEVICES = frozenset({"dp"})

# Those that take ``options["sharding"]``, a ``ShardingOptions``.
SHARDING = frozenset({"fsdp2"})

# Those that take ``options["deepspeed"]``, a ``DeepSpeedOptions``.
BY_DEEPSPEED = frozenset({"deepspeed"})


def choose(*, world_size: int, shard: bool = False) -> str:
    """Return the name of the engine that a run gets when none was asked for; ``shard``: the model is to be sharded."""
    if world_size == 1:
        return "single"
    return "fsdp2" if shard else "ddp"


def load(name: str) -> type[Engine]:
    """Import the class of the engine ``name``.

    Raises:
        ConfigError: there is none of that name; the nearest is given.
    """
    places = dict(ENGINES)
    if name not in places:  # to look at what is installed takes 15 ms and more
        places = {**{point.name: point.value for point in entry_points(group="echelon.engines")}, **places}
    if name not in places and name.lower() in _TPU:
        raise ConfigError(f"there is no engine {name!r}: echelon does not run on TPUs", do=TPU_ALTERNATIVE)
    if name not in places:
        near = get_close_matches(name, places, n=1)
        raise ConfigError(
            f"there is no engine {name!r}",
            do=f"did you mean {near[0]!r}?"
            if near
            else f"choose one of {', '.join(sorted(places))}, give an Engine, or install a package that names its own under "
            "the entry point 'echelon.engines'",
        )
    module, _, attribute = places[name].partition(":")
    engine: type[Engine] = getattr(import_module(module), attribute)
    return engine
