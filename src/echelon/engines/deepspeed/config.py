"""Reads DeepSpeed's ``ds_config.json``, resolves ``"auto"`` values, and translates it for the library or the fsdp2 engine."""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import ConfigError
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.engines.deepspeed.options import DummyOptim, DummyScheduler

_AUTO = "auto"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_TRAIN = "train_batch_size"
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


def facts_of(
    *,
    world_size: int,
    settings: Mapping[str, Setting],
    batch_sizes: Sequence[int],
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    split_batches: bool,
) -> DeepSpeedFacts:
    """Return the values of a run with these objects, for ``resolve_deepspeed``."""
    placeholders = {
        **_optimizer_settings(optimizers),
        **_scheduler_settings(schedulers, world_size=1 if split_batches else world_size),
    }
    return DeepSpeedFacts(
        world_size=world_size,
        settings={**settings, **placeholders},
        batch_sizes=tuple(batch_sizes),
        hidden_size=_hidden_size(models),
        model=type(models[0]).__name__ if models else "the model",
    )


def _hidden_size(models: Sequence[nn.Module]) -> int | None:
    """Return the hidden size from a transformers model's config, or the largest one if there are several."""
    for model in models:
        config = getattr(model, "config", None)
        for owner in (config, getattr(config, "text_config", None)):
            sizes = getattr(owner, "hidden_size", None) or getattr(owner, "hidden_sizes", None)
            if sizes:
                return max(sizes) if isinstance(sizes, (list, tuple)) else int(sizes)
    return None


def _optimizer_settings(optimizers: Sequence[Any]) -> dict[str, Setting]:
    for optimizer in optimizers:
        if isinstance(optimizer, DummyOptim):
            given = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
            return _settings_of("optimizer.params", given, "DummyOptim")
    return {}


def _scheduler_settings(schedulers: Sequence[Any], *, world_size: int) -> dict[str, Setting]:
    """Return a ``DummyScheduler``'s arguments, with the total number of steps divided by the number of processes."""
    for scheduler in schedulers:
        if not isinstance(scheduler, DummyScheduler) or scheduler.lr_scheduler_callable is not None:
            continue
        optimizer, steps = scheduler.optimizer, scheduler.total_num_steps
        given = {
            "warmup_min_lr": 0,
            "warmup_max_lr": optimizer.defaults["lr"]
            if isinstance(optimizer, Optimizer)
            else getattr(optimizer, "lr", None),
            "warmup_num_steps": max(1, scheduler.warmup_num_steps),  # DeepSpeed 0.19.6 and later reject 0
            "total_num_steps": None if steps is None else -(-steps // world_size),
        }
        known = {name: value for name, value in given.items() if value is not None}
        return _settings_of("scheduler.params", known, "DummyScheduler")
    return {}


def _settings_of(prefix: str, arguments: Mapping[str, Any], owner: str) -> dict[str, Setting]:
    return {
        f"{prefix}.{name}": Setting(value, Origin(SettingSource.CODE, f"{owner}({name}=)"))
        for name, value in arguments.items()
    }


def resolve_deepspeed(
    config: Mapping[str, Any], facts: DeepSpeedFacts, *, origin: Origin | None = None
) -> tuple[dict[str, Any], Mapping[str, Origin]]:
    """Resolve every ``"auto"`` value in ``config``, and check the other values against the run; return it and its values' origins.

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
    return resolved, origins


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


# ---- DeepSpeed's config for the fsdp2 engine, as documented in docs/engines.md ---------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """The fsdp2 counterpart of one key in DeepSpeed's config."""

    does: str
    """Description of the counterpart, for the documentation."""
    is_kept: bool = True
    """Whether fsdp2 implements the key. If not, setting it causes a warning."""
    nothing: tuple[Any, ...] = (None, False, "auto")
    """Values for which the key has no effect."""


def _none(why: str, *nothing: Any) -> Counterpart:
    return Counterpart(does=f"no counterpart: {why}", is_kept=False, nothing=(None, False, "auto", *nothing))


def _is(does: str) -> Counterpart:
    return Counterpart(does=does)


_NVME = _none("fsdp2 does not offload to NVMe")
_BUCKETS = _none("fsdp2 communicates one unit (a block of the model) at a time, without buckets")
_LIVE = _none("fsdp2 keeps only the current unit and the next one unsharded")

COUNTERPARTS: Mapping[str, Counterpart] = MappingProxyType(
    {
        f"{_ZERO}.stage": _is(
            "3: `reshard_after_forward=True`; 2: `reshard_after_forward=False`; 1 and 0 raise an error (use `engine='zero1'` or `'ddp'`)"
        ),
        f"{_ZERO}.offload_optimizer.device": _is(
            "`cpu`: parameters, gradients and optimizer states are all kept on the CPU; `nvme` raises an error"
        ),
        f"{_ZERO}.offload_optimizer.pin_memory": _is(
            "`CPUOffloadPolicy(pin_memory=)`; without an accelerator, nothing is pinned"
        ),
        f"{_ZERO}.offload_optimizer.nvme_path": _NVME,
        f"{_ZERO}.offload_optimizer.buffer_count": _NVME,
        f"{_ZERO}.offload_optimizer.fast_init": _NVME,
        f"{_ZERO}.offload_param.device": _is("the same as `offload_optimizer.device`"),
        f"{_ZERO}.offload_param.pin_memory": _is("the same as `offload_optimizer.pin_memory`"),
        f"{_ZERO}.offload_param.nvme_path": _NVME,
        f"{_ZERO}.offload_param.buffer_count": _NVME,
        f"{_ZERO}.offload_param.buffer_size": _NVME,
        f"{_ZERO}.offload_param.max_in_cpu": _NVME,
        f"{_ZERO}.overlap_comm": _is("always on: communication overlaps with computation"),
        f"{_ZERO}.contiguous_gradients": _is("always on: each unit's gradients are in one buffer"),
        f"{_ZERO}.reduce_scatter": _is("always on: gradients are reduce-scattered"),
        f"{_ZERO}.sub_group_size": _none("the optimizer updates all of its shards at once"),
        f"{_ZERO}.reduce_bucket_size": _BUCKETS,
        f"{_ZERO}.allgather_bucket_size": _BUCKETS,
        f"{_ZERO}.allgather_partitions": _is("always on: shards are all-gathered"),
        f"{_ZERO}.round_robin_gradients": _none("gradients are reduced to the rank that holds the shard"),
        f"{_ZERO}.stage3_prefetch_bucket_size": _none("the next unit is always prefetched"),
        f"{_ZERO}.stage3_param_persistence_threshold": _none("small parameters are gathered with their unit"),
        f"{_ZERO}.stage3_max_live_parameters": _LIVE,
        f"{_ZERO}.stage3_max_reuse_distance": _LIVE,
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _is(
            "always on: full state dicts can be gathered on rank zero, in float32"
        ),
        f"{_ZERO}.zero_hpz_partition_size": _is("`reshard_after_forward` is set to that number of ranks"),
        "gradient_accumulation_steps": _is("`Accelerator(gradient_accumulation_steps=)`"),
        "gradient_clipping": _is(
            "gradients are clipped to that norm before each step, unless the loop has clipped them"
        ),
        "train_batch_size": _is("must equal micro-batch size x accumulation steps x processes"),
        "train_micro_batch_size_per_gpu": _is("must equal the loader's batch size"),
        "fp16.enabled": _is('`mixed_precision="fp16"`'),
        "fp16.auto_cast": _is("always on: the model's inputs are cast"),
        "fp16.loss_scale": _is(
            "0: a dynamic scale; any other number: a scale that never grows and is halved if gradients are infinite"
        ),
        "fp16.loss_scale_window": _is("`GradScalerKwargs(growth_interval=)`"),
        "fp16.initial_scale_power": _is("`GradScalerKwargs(init_scale=2**n)`"),
        "fp16.hysteresis": _none("the scale is halved at the first infinite gradient", 1),
        "fp16.min_loss_scale": _none("the scale has no lower bound", 0),
        "bf16.enabled": _is('`mixed_precision="bf16"`'),
        "steps_per_print": _none("fsdp2 prints nothing", float("inf"), 0),
        "wall_clock_breakdown": _none("use `accelerator.profile()`"),
        "zero_allow_untested_optimizer": _is(
            "always on: any optimizer works if its state has the same shape as its parameters"
        ),
        "zero_force_ds_cpu_optimizer": _is("no effect: the optimizer passed to `prepare` is used"),
        "optimizer": _is("raises an error; pass a torch optimizer to `prepare`"),
        "scheduler": _is("raises an error; pass a torch scheduler to `prepare`"),
    }
)


def list_without_counterpart(values: Mapping[str, Any]) -> list[str]:
    """Return ``key=value (reason)`` for each dotted key in ``values`` that has no counterpart in fsdp2."""
    missing = []
    for key, value in values.items():
        if key.partition(".")[0] in ("optimizer", "scheduler"):
            continue
        known = COUNTERPARTS.get(key, _none("unknown key"))
        if not known.is_kept and not any(value is one or value == one for one in known.nothing):
            missing.append(f"{key}={value} ({known.does.removeprefix('no counterpart: ')})")
    return missing


def table() -> str:
    """Return the table for the documentation as Markdown."""
    rows = [f"| `{key}` | {entry.does} |" for key, entry in COUNTERPARTS.items()]
    return "\n".join(["| DeepSpeed config key | what `fsdp2` does |", "|---|---|", *rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2Settings:
    """The settings from DeepSpeed's config that fsdp2 implements."""

    reshard_after_forward: bool | int
    cpu_offload: bool
    pin_memory: bool
    scaler: Mapping[str, Any]
    """Arguments for torch's ``GradScaler``."""
    without_counterpart: list[str]
    """The result of ``list_without_counterpart``."""


def translate_to_fsdp2(config: HfDeepSpeedConfig) -> FSDP2Settings:
    """Translate ``config`` for the fsdp2 engine.

    Raises:
        ConfigError: fsdp2 cannot implement a setting.
    """
    where = f"engine='fsdp2', {config.origin}"
    stage = int(config.get_value(f"{_ZERO}.stage", 0))
    if stage < 2:
        raise ConfigError(
            f"ZeRO stage {stage} has no counterpart in fsdp2",
            where=f"{where} {_ZERO}.stage",
            do=f"use engine={'zero1' if stage else 'ddp'!r} without deepspeed_plugin, or ZeRO stage 2 or 3",
        )
    for key, object_ in (("optimizer", "an optimizer"), ("scheduler", "a scheduler")):
        if key in config.config:
            raise ConfigError(
                f"DeepSpeed's config defines {object_} ({key!r}), which fsdp2 does not create",
                where=f"{where} {key}",
                do=f"remove it, and pass {object_} from torch to prepare()",
            )
    pinned = _pinned(config, where)
    secondary = int(config.get_value(f"{_ZERO}.zero_hpz_partition_size", 1))
    return FSDP2Settings(
        reshard_after_forward=secondary if stage == 3 and secondary > 1 else stage == 3,
        cpu_offload=bool(pinned),
        pin_memory=all(pinned),
        scaler=_scaler_arguments(config.config.get("fp16") or {}),
        without_counterpart=list_without_counterpart(flatten(config.config)),
    )


def _pinned(config: HfDeepSpeedConfig, where: str) -> list[bool]:
    """Return ``pin_memory`` for each kind of tensor that is offloaded to the CPU."""
    pinned = []
    for name in ("offload_optimizer", "offload_param"):
        node = config.get_value(f"{_ZERO}.{name}") or {}
        device = node.get("device", "none")
        if device == "nvme":
            raise ConfigError(
                f"{_ZERO}.{name}.device='nvme' has no counterpart in fsdp2",
                where=where,
                do="use 'cpu', or engine='deepspeed'",
            )
        if device == "cpu":
            pinned.append(bool(node.get("pin_memory", True)))
    return pinned


def _scaler_arguments(fp16: Mapping[str, Any]) -> dict[str, Any]:
    if fp16.get("loss_scale", 0):
        return {"init_scale": float(fp16["loss_scale"]), "growth_interval": 2**31 - 1}  # the scale never grows
    arguments: dict[str, Any] = {}
    if "initial_scale_power" in fp16:
        arguments["init_scale"] = 2.0 ** int(fp16["initial_scale_power"])
    if "loss_scale_window" in fp16:
        arguments["growth_interval"] = int(fp16["loss_scale_window"])
    return arguments


# ---- DeepSpeed's config for the library ------------------------------------------------------------------------------


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


def is_on(config: Mapping[str, Any], dtype: str) -> bool:
    """Return whether ``dtype`` (``fp16`` or ``bf16``) is enabled."""
    return bool((config.get(dtype) or {}).get("enabled", dtype in config))


def replaces_optimizer_on_host(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer state is offloaded and DeepSpeed's CPU optimizer replaces the user's optimizer."""
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    return offload.get("device", "none") != "none" and bool(config.get("zero_force_ds_cpu_optimizer", True))


def evaluation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for a model that has no optimizer."""
    plain = copy.deepcopy(dict(config))
    for key in ("optimizer", "scheduler", "gradient_clipping"):
        plain.pop(key, None)
    return _with_defaults(plain)


def training_config(
    config: Mapping[str, Any], optimizer: Any, *, scaler: torch.amp.GradScaler | None, on_cpu: bool
) -> dict[str, Any]:
    """Return the config for a model that ``optimizer`` (a torch optimizer or a ``DummyOptim``) trains.

    Raises:
        ConfigError: there is no optimizer or more than one, or DeepSpeed does not support the loss scale settings.
    """
    own = _with_defaults(copy.deepcopy(dict(config)))
    if stage_of(own) == 0:
        # In stage 0 the library keeps no float32 weights for bf16. Use autocast instead, like other engines.
        own.pop("fp16", None)
        own.pop("bf16", None)
    if stage_of(own) == 1:
        # Gradients are reduced after the backward passes. With this setting, the library then skips the reduction (0.19.8).
        own["zero_optimization"]["overlap_comm"] = False
    if is_on(own, "fp16") and scaler is not None:
        _copy_scaler_settings(scaler, own["fp16"])
    if not isinstance(optimizer, DummyOptim):
        if "optimizer" in own:
            raise ConfigError(
                f"DeepSpeed's config defines an optimizer ({own['optimizer'].get('type')}), but prepare() also got "
                f"{type(optimizer).__name__}",
                where="ds_config 'optimizer', and prepare()",
                do="pass a DummyOptim to prepare(), or remove 'optimizer' from the config",
            )
        own.setdefault("zero_allow_untested_optimizer", True)
    elif "optimizer" not in own:
        raise ConfigError(
            "prepare() got a DummyOptim, but DeepSpeed's config does not define an optimizer",
            where="ds_config 'optimizer'",
            do="add an 'optimizer' to the config, or pass a torch optimizer to prepare()",
        )
    if on_cpu:
        # All tensors are on the host, so torch's optimizers can step them without compiling a kernel.
        own.setdefault("zero_force_ds_cpu_optimizer", False)
        of_config = own.get("optimizer", {})
        if str(of_config.get("type", "")).lower() in ("adam", "adamw"):
            of_config.setdefault("params", {}).setdefault("torch_adam", True)
    return own


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    config.setdefault("steps_per_print", math.inf)
    return config


def _copy_scaler_settings(scaler: torch.amp.GradScaler, fp16: dict[str, Any]) -> None:
    """Copy the settings of ``scaler`` that the config does not define to DeepSpeed's loss scaler."""
    growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
    if (growth, backoff) != (2.0, 0.5):
        raise ConfigError(
            f"the loss scale grows by {growth} and shrinks by {backoff}, but DeepSpeed's factors are always 2 and 0.5",
            where="GradScalerKwargs(growth_factor=, backoff_factor=)",
            do="remove both arguments",
        )
    fp16.setdefault("initial_scale_power", round(math.log2(scaler.get_scale())))
    fp16.setdefault("loss_scale_window", scaler.get_growth_interval())
