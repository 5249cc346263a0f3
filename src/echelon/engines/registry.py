"""Registry of engine classes by name, imported on first use. Packages can add engines in the entry point group ``echelon.engines``."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.compat.unsupported import TPU_ALTERNATIVE
from echelon.engines.base import Engine

ENGINES = {
    "single": "echelon.engines.single:SingleEngine",
    "dp": "echelon.engines.dp:DPEngine",
    "ddp": "echelon.engines.ddp:DDPEngine",
    "zero1": "echelon.engines.zero1:Zero1Engine",
    "fsdp2": "echelon.engines.fsdp.fsdp2:FSDP2Engine",
    "deepspeed": "echelon.engines.deepspeed.engine:DeepSpeedEngine",
}


# Engine names that refer to TPUs.
_TPU = frozenset({"tpu", "xla", "torch_xla", "torchxla"})

# Engines that need no process group. For other engines, a single process creates a group of one rank.
GROUPLESS = frozenset({"single", "dp"})

# Engines that use all visible devices from a single process.
ON_ALL_DEVICES = frozenset({"dp"})

# Engines with ``ShardingOptions`` in ``options["sharding"]``.
SHARDING = frozenset({"fsdp2"})

# Engines with ``DeepSpeedOptions`` in ``options["deepspeed"]``.
BY_DEEPSPEED = frozenset({"deepspeed"})


def default_engine(*, world_size: int, shard: bool = False) -> str:
    """Return the name of the default engine; ``shard`` says whether the run shards the model."""
    if world_size == 1:
        return "single"
    return "fsdp2" if shard else "ddp"


def load_engine(name: str) -> type[Engine]:
    """Import and return the engine class registered under ``name``.

    Raises:
        ConfigError: the engine is unknown; the message suggests the closest match.
    """
    places = dict(ENGINES)
    if name not in places:  # reading the installed entry points takes at least 15 ms
        places = {**{point.name: point.value for point in entry_points(group="echelon.engines")}, **places}
    if name not in places and name.lower() in _TPU:
        raise ConfigError(_("unknown engine {name!r}: echelon does not run on TPUs", name=name), do=TPU_ALTERNATIVE)
    if name not in places:
        near = get_close_matches(name, places, n=1)
        raise ConfigError(
            _("unknown engine {name!r}", name=name),
            do=_("did you mean {near!r}?", near=near[0])
            if near
            else _(
                "choose one of {places}, pass an Engine object, or install a package that registers this engine in "
                "the entry point group 'echelon.engines'",
                places=", ".join(sorted(places)),
            ),
        )
    module, _colon, attribute = places[name].partition(":")
    engine: type[Engine] = getattr(import_module(module), attribute)
    return engine
