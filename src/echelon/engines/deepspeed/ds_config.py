"""Reads DeepSpeed's ``ds_config.json``, looks up dotted keys, and resolves ``"auto"`` values. Does not import torch."""

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

__all__ = [
    "DeepSpeedFacts",
    "HfDeepSpeedConfig",
    "ResolvedDeepSpeed",
    "flatten",
    "read_deepspeed_config",
    "resolve_deepspeed",
    "unresolved",
]

_AUTO = "auto"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_TRAIN = "train_batch_size"
_CLIPPING = "gradient_clipping"
_ZERO = "zero_optimization"
_GATHER = f"{_ZERO}.stage3_gather_16bit_weights_on_model_save"
# Bucket sizes as functions of the model's hidden size h. Source: transformers.integrations.deepspeed, accelerate 1.15.
_OF_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {
        f"{_ZERO}.reduce_bucket_size": lambda h: h * h,
        f"{_ZERO}.stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
        f"{_ZERO}.stage3_param_persistence_threshold": lambda h: 10 * h,
    }
)
_INTEGERS = frozenset({_MICRO, _ACCUMULATION, _TRAIN, f"{_ZERO}.stage", *_OF_HIDDEN_SIZE})


def read_deepspeed_config(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], Origin]:
    """Read a config from a file, a mapping (which is copied), JSON text or base64-encoded JSON; return it and its origin.

    Raises:
        ConfigError: ``source`` is none of these, or does not contain a JSON object.
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
                f"DeepSpeed config not found: {source}",
                where="deepspeed_config_file",
                do="pass the path to a JSON file, a dict, or a JSON string",
            ) from None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{origin.detail} is not valid JSON: {error}", do="correct the JSON at this position"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"expected {origin.detail} to be a JSON object", do='write {"zero_optimization": {...}}')
    return config, origin


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # the text is too long for a path
        return False


class HfDeepSpeedConfig:
    """A DeepSpeed config whose values can be accessed by dotted key (``zero_optimization.stage``).

    Args:
        config_file_or_dict: the config's source; see ``read_deepspeed_config``.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config, self.origin = read_deepspeed_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Update the cached stage and offloading flag after ``config`` changes."""
        stage = self.get_value(f"{_ZERO}.stage", -1)
        self._stage = -1 if stage == _AUTO else int(stage)
        devices = {self.get_value(f"{_ZERO}.offload_{what}.device") for what in ("optimizer", "param")}
        self._offload = self._stage >= 2 and bool(devices & {"cpu", "nvme"})

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the object that contains the key (or None if it does not exist) and the last part of the key."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for name in path:
            node = node.get(name)
            if node is None:
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the key's value, or ``default`` if the key does not exist."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete the key and everything nested under it.

        Raises:
            ConfigError: the key does not exist and ``must_exist`` is True.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ConfigError(f"DeepSpeed's config has no {ds_key_long}", do="check the key's name")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether the key is set to a true value."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether the key is set to a false value."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the ZeRO stage is 2, in which gradients are sharded but parameters are not."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Return whether the ZeRO stage is 3, in which parameters are sharded."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer states are offloaded to the CPU or to NVMe."""
        return self._offload


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFacts:
    """The run's values that ``"auto"`` entries resolve to."""

    world_size: int
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Settings by dotted key, such as ``gradient_accumulation_steps`` or ``optimizer.params.lr``."""
    batch_sizes: tuple[int, ...] = ()
    """Batch size per process for each prepared loader. The first loader is the training loader."""
    hidden_size: int | None = None
    """Hidden size in the model's config."""
    model: str = "the model"
    """The model's class name, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDeepSpeed:
    """A config without ``"auto"`` values, and the origin of each value."""

    config: dict[str, Any]
    origins: Mapping[str, Origin]
    """Origin of each value, by dotted key."""


def resolve_deepspeed(
    config: Mapping[str, Any], facts: DeepSpeedFacts, *, origin: Origin | None = None
) -> ResolvedDeepSpeed:
    """Resolve every ``"auto"`` value in ``config``, and check the other values against the run.

    The micro-batch size comes from the loader, and accumulation and clipping come from the run. The train batch size is the
    product of the micro-batch size, the accumulation steps and the number of processes. Dtypes depend on ``mixed_precision``,
    and bucket sizes on the model's hidden size.

    Args:
        config: config in DeepSpeed's format; it is not modified.
        facts: the run's values.
        origin: where ``config`` comes from.

    Raises:
        ConfigError: an ``"auto"`` value cannot be resolved, or two values conflict. The message names the key and both origins.
    """
    own = origin or Origin(SettingSource.CODE, "DeepSpeed config")
    resolved = copy.deepcopy(dict(config))
    origins: dict[str, Origin] = {}
    known = {**_bucket_sizes(facts), **facts.settings}
    _add_batch_sizes(resolved, known, facts, own)
    for node, name, key in _leaves(resolved):
        value = node[name]
        if value != _AUTO:
            node[name] = _integer(key, value, own) if key in _INTEGERS else value
            origins[key] = Origin(own.source, f"{own.detail} {key}".strip())
            _check_conflict(key, node[name], origins[key], known.get(key))
        elif key in known:
            node[name], origins[key] = known[key].value, known[key].origin
        else:
            raise _unresolvable(key, own, facts)
    _check_train_batch_size(resolved, origins, facts)
    return ResolvedDeepSpeed(config=resolved, origins=origins)


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    for name, value in list(config.items()):
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield config, name, f"{prefix}{name}"


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``config`` by dotted key."""
    return {key: node[name] for node, name, key in _leaves(dict(config))}


def unresolved(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values are still ``"auto"``."""
    return [key for key, value in flatten(config).items() if value == _AUTO]


def _integer(key: str, value: Any, origin: Origin) -> int:
    """Return ``value``, such as ``"8"``, ``5e8`` or ``8``, as an integer."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.5
    if number != int(number):
        raise ConfigError(
            f"expected {key} to be an integer, but got {value!r}", where=str(origin), do="set an integer or 'auto'"
        )
    return int(number)


def _add_batch_sizes(config: Mapping[str, Any], known: dict[str, Setting], facts: DeepSpeedFacts, own: Origin) -> None:
    """Add the micro-batch size and the train batch size to ``known``."""
    given = config.get(_MICRO, _AUTO)
    if given != _AUTO:
        given = _integer(_MICRO, given, own)
    if facts.batch_sizes:
        # With several loaders, use the batch size that matches, because the training loader is unknown here.
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


def _bucket_sizes(facts: DeepSpeedFacts) -> dict[str, Setting]:
    if facts.hidden_size is None:
        return {}
    origin = Origin(SettingSource.DERIVED, f"hidden size {facts.hidden_size} of {facts.model}")
    return {key: Setting(size(facts.hidden_size), origin) for key, size in _OF_HIDDEN_SIZE.items()}


def _check_conflict(key: str, value: Any, origin: Origin, known: Setting | None) -> None:
    """Raise an error if one of the run's values differs from the config and is not a default."""
    if key == _TRAIN or known is None or known.value == value or known.origin.source is SettingSource.DEFAULT:
        return
    if key in _OF_HIDDEN_SIZE or key == _GATHER:
        return  # affects speed only
    raise ConfigError(
        f"{key}={value!r} (from {origin}) conflicts with {known.value!r} (from {known.origin})",
        where=f"DeepSpeed config {key}",
        do=f'set both to the same value, or write "{key.rpartition(".")[2]}": "auto" in DeepSpeed\'s config',
    )


def _check_train_batch_size(config: Mapping[str, Any], origins: Mapping[str, Origin], facts: DeepSpeedFacts) -> None:
    if _TRAIN not in config or _MICRO not in config:
        return
    steps = int(config.get(_ACCUMULATION, 1))
    product = int(config[_MICRO]) * steps * facts.world_size
    if int(config[_TRAIN]) != product:
        raise ConfigError(
            f"{_TRAIN}={config[_TRAIN]} (from {origins[_TRAIN]}) does not equal {_MICRO}={config[_MICRO]} (from "
            f"{origins[_MICRO]}) x {_ACCUMULATION}={steps} (from {origins.get(_ACCUMULATION, 'default')}) x "
            f"{facts.world_size} processes = {product}",
            where=f"DeepSpeed config {_TRAIN}",
            do=f'write "{_TRAIN}": "auto", or start {int(config[_TRAIN]) / (product / facts.world_size):g} processes',
        )


def _unresolvable(key: str, own: Origin, facts: DeepSpeedFacts) -> ConfigError:
    reason, do = "none of the run's settings determines it", "set a value there"
    if key in _OF_HIDDEN_SIZE:
        reason = f"it depends on the model's hidden size, and {facts.model} has no config.hidden_size"
        do = "set a number there, or give the model a .config with a hidden_size"
    elif key in (_MICRO, _TRAIN):
        reason = "no loader with a batch size was prepared before the model"
        do = "pass the DataLoader to prepare() together with the model, or set a number there"
    return ConfigError(f'{key} is "auto", but {reason}', where=f"{own} {key}", do=do)
