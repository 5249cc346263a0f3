"""DeepSpeed's ``ds_config.json``: read, asked by dotted keys, and its ``"auto"`` values found out from the run."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echelon.base.errors import ConfigError
from echelon.config.origin import Origin, Setting, SettingSource

__all__ = ["DeepSpeedFacts", "HfDeepSpeedConfig", "ResolvedDeepSpeed", "read_deepspeed_config", "resolve_deepspeed"]

_AUTO = "auto"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_TRAIN = "train_batch_size"
_CLIPPING = "gradient_clipping"
_ZERO = "zero_optimization"
_GATHER = f"{_ZERO}.stage3_gather_16bit_weights_on_model_save"
# Sizes that go with the hidden size h of the model. Source: transformers.integrations.deepspeed, accelerate 1.15.
_OF_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {
        f"{_ZERO}.reduce_bucket_size": lambda h: h * h,
        f"{_ZERO}.stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
        f"{_ZERO}.stage3_param_persistence_threshold": lambda h: 10 * h,
    }
)
_INTEGERS = frozenset({_MICRO, _ACCUMULATION, _TRAIN, f"{_ZERO}.stage", *_OF_HIDDEN_SIZE})


def read_deepspeed_config(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], Origin]:
    """Read a config from a file, a mapping (which is copied), JSON text, or such text in base64; return its origin, too.

    Raises:
        ConfigError: it is none of these, or no JSON object.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), Origin(SettingSource.CODE, "DeepSpeed config")
    text = str(source)
    origin = Origin(SettingSource.CODE, "DeepSpeed config")
    if _is_file(text):
        origin = Origin(SettingSource.FILE, text)
        text = Path(text).read_text(encoding="utf-8")
    elif not text.lstrip().startswith("{"):
        try:
            text = base64.urlsafe_b64decode(text).decode("utf-8")
        except ValueError:
            raise ConfigError(
                f"there is no DeepSpeed config {source}",
                where="deepspeed_config_file",
                do="give the path of a JSON file, a dict, or JSON text",
            ) from None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{origin.detail} is no JSON: {error}", do="mend it at the place named above") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{origin.detail} holds no JSON object", do='write {"zero_optimization": {...}}')
    return config, origin


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a long text is no path
        return False


class HfDeepSpeedConfig:
    """A DeepSpeed config that can be asked by dotted keys (``zero_optimization.stage``).

    Args:
        config_file_or_dict: a path, a dict (which is copied), or JSON text, also in base64.

    Raises:
        ConfigError: it cannot be read.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config, self.origin = read_deepspeed_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Look again at the stage and at what is offloaded."""
        stage = self.get_value(f"{_ZERO}.stage", -1)
        self._stage = -1 if stage == _AUTO else int(stage)
        devices = {self.get_value(f"{_ZERO}.offload_{what}.device") for what in ("optimizer", "param")}
        self._offload = self._stage >= 2 and bool(devices & {"cpu", "nvme"})

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the object that holds the key, and the key in it; None where there is no such object."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for name in path:
            node = node.get(name)
            if node is None:
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of the key, or ``default``."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete the key with all below it.

        Raises:
            ConfigError: it is not there, and ``must_exist``.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ConfigError(f"DeepSpeed's config has no {ds_key_long}", do="check the name of the key")

    def is_true(self, ds_key_long: str) -> bool:
        """Tell whether the key is there and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Tell whether the key is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Tell whether gradients are sharded, and parameters not."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Tell whether parameters are sharded."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Tell whether anything lives on the host or on NVMe."""
        return self._offload


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFacts:
    """What the run knows that a config may leave to be found out."""

    world_size: int
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """By dotted key, such as ``gradient_accumulation_steps`` or ``optimizer.params.lr``."""
    batch_sizes: tuple[int, ...] = ()
    """Of one process, of each prepared loader; the first is the one that trains."""
    hidden_size: int | None = None
    """Of the model's config."""
    model: str = "the model"
    """Its class, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDeepSpeed:
    """A config without ``"auto"``, and where each of its values is from."""

    config: dict[str, Any]
    origins: Mapping[str, Origin]
    """By dotted key."""


def resolve_deepspeed(
    config: Mapping[str, Any], facts: DeepSpeedFacts, *, origin: Origin | None = None
) -> ResolvedDeepSpeed:
    """Find out every ``"auto"`` of ``config``, and check it against the run.

    The micro batch is the loader's, accumulation and clipping are the run's, the train batch is the product, dtypes follow
    mixed_precision, and bucket sizes the model's hidden size.

    Args:
        config: as DeepSpeed reads it; it is not changed.
        facts: of the run.
        origin: of ``config``.

    Raises:
        ConfigError: a value that nobody knows, or two that cannot both hold; the key and both origins are named.
    """
    own = origin or Origin(SettingSource.CODE, "DeepSpeed config")
    resolved = copy.deepcopy(dict(config))
    origins: dict[str, Origin] = {}
    known = dict(facts.settings)
    _know_batches(resolved, known, facts, own)
    _know_sizes(known, facts)
    for node, name, key in _leaves(resolved):
        value = node[name]
        if value != _AUTO:
            node[name] = _integer(key, value, own) if key in _INTEGERS else value
            origins[key] = Origin(own.source, f"{own.detail} {key}".strip())
            _require_same(key, node[name], origins[key], known.get(key))
        elif key in known:
            node[name], origins[key] = known[key].value, known[key].origin
        else:
            raise _unknown(key, own, facts)
    _check_product(resolved, origins, facts, own)
    return ResolvedDeepSpeed(config=resolved, origins=origins)


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    for name, value in list(config.items()):
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield config, name, f"{prefix}{name}"


def _integer(key: str, value: Any, origin: Origin) -> int:
    """Return ``value`` as an integer: ``"8"``, ``5e8`` and ``8`` are numbers all."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.5
    if number != int(number):
        raise ConfigError(f"{key}={value!r} is no integer", where=str(origin), do="give one, or 'auto'")
    return int(number)


def _know_batches(config: Mapping[str, Any], known: dict[str, Setting], facts: DeepSpeedFacts, own: Origin) -> None:
    """Add the micro batch and the train batch to what is known."""
    given = config.get(_MICRO, _AUTO)
    if given != _AUTO:
        given = _integer(_MICRO, given, own)
    if facts.batch_sizes:
        # One of several loaders: which of them trains cannot be seen.
        size = given if given in facts.batch_sizes else facts.batch_sizes[0]
        known[_MICRO] = Setting(size, Origin(SettingSource.DERIVED, "DataLoader(batch_size=)"))
    micro = known[_MICRO].value if _MICRO in known else given
    steps = config.get(_ACCUMULATION, _AUTO)
    if steps == _AUTO and _ACCUMULATION in known:
        steps = known[_ACCUMULATION].value
    if micro != _AUTO and steps != _AUTO:
        product = int(str(micro)) * _integer(_ACCUMULATION, steps, own) * facts.world_size
        formula = f"{_MICRO} {micro} x {_ACCUMULATION} {steps} x {facts.world_size} processes"
        known.setdefault(_TRAIN, Setting(product, Origin(SettingSource.DERIVED, formula)))


def _know_sizes(known: dict[str, Setting], facts: DeepSpeedFacts) -> None:
    if facts.hidden_size is not None:
        for key, size in _OF_HIDDEN_SIZE.items():
            origin = Origin(SettingSource.DERIVED, f"hidden size {facts.hidden_size} of {facts.model}")
            known.setdefault(key, Setting(size(facts.hidden_size), origin))


def _require_same(key: str, value: Any, origin: Origin, known: Setting | None) -> None:
    """Raise where the run says something else than the config, and neither is a default."""
    if key == _TRAIN or known is None or known.value == value or known.origin.source is SettingSource.DEFAULT:
        return
    if key in _OF_HIDDEN_SIZE or key == _GATHER:
        return  # a choice of speed, and nobody else's
    raise ConfigError(
        f"{key}={value!r} (from {origin}) and {known.value!r} (from {known.origin}) cannot both hold",
        where=f"DeepSpeed config {key}",
        do=f'make them equal, or write "{key.rpartition(".")[2]}": "auto" in DeepSpeed\'s config',
    )


def _check_product(
    config: Mapping[str, Any], origins: Mapping[str, Origin], facts: DeepSpeedFacts, own: Origin
) -> None:
    if _TRAIN not in config or _MICRO not in config:
        return
    steps = int(config.get(_ACCUMULATION, 1))
    product = int(config[_MICRO]) * steps * facts.world_size
    if int(config[_TRAIN]) != product:
        raise ConfigError(
            f"{_TRAIN}={config[_TRAIN]} (from {origins[_TRAIN]}) is not {_MICRO}={config[_MICRO]} (from {origins[_MICRO]}) x "
            f"{_ACCUMULATION}={steps} (from {origins.get(_ACCUMULATION, 'default')}) x {facts.world_size} processes = {product}",
            where=f"DeepSpeed config {_TRAIN}",
            do=f'write "{_TRAIN}": "auto", or start {int(config[_TRAIN]) / (product / facts.world_size):g} processes',
        )


def _unknown(key: str, own: Origin, facts: DeepSpeedFacts) -> ConfigError:
    if key in _OF_HIDDEN_SIZE:
        return ConfigError(
            f'{key} is "auto", which goes by the hidden size of the model, and {facts.model} has no config.hidden_size',
            where=f"{own} {key}",
            do="write a number there, or give the model a .config with a hidden_size",
        )
    if key in (_MICRO, _TRAIN):
        return ConfigError(
            f'{key} is "auto", and no loader with a batch size was prepared before the model',
            where=f"{own} {key}",
            do="give prepare() the DataLoader together with the model, or write a number there",
        )
    return ConfigError(
        f'{key} is "auto", and nothing in the run says what it is', where=f"{own} {key}", do="write a value there"
    )
