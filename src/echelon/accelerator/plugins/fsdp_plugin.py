"""``FullyShardedDataParallelPlugin``: Accelerate's sharding settings, translated for the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from echelon.base.errors import ConfigError, UsageError
from echelon.base.keywords import suggest_keywords
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.compat.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY, FSDP_STATE_DICT_TYPE
from echelon.compat.variables import str_to_bool
from echelon.config.plugin_arguments import plugin_arguments
from echelon.config.schema import ActivationMode
from echelon.config.sources import refuse_misspelled
from echelon.engines.fsdp.options import ShardingOptions, wrap_nothing
from echelon.world.world import World

_logger = get_logger(__name__)

# Arguments without a setting. The setting of each other argument is ``fsdp_<argument>`` or has a different name.
_WITHOUT_SETTING = frozenset(
    {"mixed_precision_policy", "state_dict_config", "optim_state_dict_config", "limit_all_gathers", "param_init_fn"}
)
_OTHER_NAMES = {
    "fsdp_version": "fsdp_version",
    "cpu_offload": "fsdp_offload_params",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}
# Arguments that use their setting only together with certain values of other arguments.
_DEPENDENT = frozenset(
    ("sharding_strategy", "reshard_after_forward", "auto_wrap_policy", "transformer_cls_names_to_wrap")
    + ("min_num_params", "state_dict_type")
)
# Options without effect: their neutral value, and why other values have no effect.
_OBSOLETE = {
    "backward_prefetch": (
        "NO_PREFETCH",
        "the next unit is always gathered during the backward pass of the current one",
    ),
    "forward_prefetch": (False, "gathering always overlaps with the forward pass"),
    "limit_all_gathers": (True, "memory is freed early enough without a limit"),
    "use_orig_params": (True, "parameters always keep their names and shapes"),
    "sync_module_states": (False, "prepare() always copies rank zero's weights to all ranks"),
    "param_init_fn": (None, "parameters on the meta device receive their weights from rank zero"),
    "state_dict_config": (None, "full state dicts are gathered in rank zero's host memory"),
    "optim_state_dict_config": (None, "full state dicts are gathered in rank zero's host memory"),
}
# Fields that affect saving, not training, and may change after the Accelerator was created.
_CHANGEABLE = frozenset({"state_dict_type", "state_dict_config", "optim_state_dict_config", "_is_used"})

_DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_STRATEGIES = tuple(ShardingStrategy)  # in the order of FSDP_SHARDING_STRATEGY, numbered from 1
_RESHARDING = frozenset({ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD})
_HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2})


@suggest_keywords
@dataclass
class FullyShardedDataParallelPlugin:
    """How the model is sharded across ranks. None: use the setting (flag, ``FSDP_*``, file), else the documented default.

    Sharding uses ``torch.distributed.fsdp.fully_shard``. FSDP1 arguments are translated; those without effect are
    listed in one warning.

    Raises:
        ConfigError: a value is unknown, settings contradict each other, or an environment variable is misspelled.
    """

    fsdp_version: int = None  # type: ignore[assignment]
    """FSDP version that the arguments are written for: 1 (default) or 2. It determines the default of
    ``state_dict_type`` and the meaning of numbers in ``reshard_after_forward``."""
    sharding_strategy: Any = None
    """``FULL_SHARD``, ``SHARD_GRAD_OP``, ``NO_SHARD``, ``HYBRID_SHARD``, ``HYBRID_SHARD_ZERO2``, their numbers
    (starting at 1), or torch's enum. Hybrid strategies shard within each machine."""
    reshard_after_forward: Any = None
    """True (default): free unsharded parameters after the forward pass. False: keep them until the backward pass. A
    number (version 2): reshard them across that many ranks. Version 1 also accepts ``sharding_strategy`` values."""
    backward_prefetch: Any = None
    """Has no effect, like the other fields without a description."""
    mixed_precision_policy: Any = None
    """A name (``bf16``, ``fp16``, ``fp8``, ``fp32``), a dict of dtypes, torch's ``MixedPrecisionPolicy`` or
    ``MixedPrecision``. None: the Accelerator's ``mixed_precision``. A name sets the dtype of parameters and inputs;
    gradients are reduced in float32, as in DDP (Accelerate uses the low precision), and outputs are not cast."""
    auto_wrap_policy: Any = None
    """``transformer_based_wrap``, ``size_based_wrap``, ``no_wrap``, a function that takes a module, or a torch policy.
    None: wrap the classes in the model's ``_no_split_modules`` (Accelerate: ``no_wrap``)."""
    cpu_offload: Any = None
    """Whether to offload to the CPU: a bool, or torch's ``CPUOffload`` or ``CPUOffloadPolicy``."""
    ignored_modules: Any = None
    """Modules (or a regular expression that matches full module or parameter names) to leave unsharded on every rank.
    """
    state_dict_type: Any = None
    """``FULL_STATE_DICT`` (version 1 default) or ``SHARDED_STATE_DICT`` (version 2 default). Both write full tensors,
    because sharded state dicts are not supported."""
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool = None  # type: ignore[assignment]
    activation_checkpointing: bool = None  # type: ignore[assignment]
    activation_checkpointing_offload: bool = None  # type: ignore[assignment]
    """Keep the inputs of recomputed units on the CPU, with ``activation_checkpointing``."""
    cpu_ram_efficient_loading: bool = None  # type: ignore[assignment]
    """Whether to load weights only on rank zero, which sends them to the other ranks in parts; each rank frees its own
    weights in the process. The environment variables that transformers reads are set accordingly."""
    transformer_cls_names_to_wrap: list[str] | None = None
    """Classes for ``transformer_based_wrap``, which becomes the default policy. None: ``_no_split_modules``."""
    min_num_params: int | None = None
    """Number of parameters for ``size_based_wrap``, which becomes the default policy."""

    def __post_init__(self) -> None:
        self._is_used = False
        given = frozenset(f.name for f in fields(self) if getattr(self, f.name) is not None)
        refuse_misspelled("FSDP_")
        names = [f.name for f in fields(self) if f.name not in _WITHOUT_SETTING]
        self._settings = plugin_arguments(self, {name: _OTHER_NAMES.get(name, f"fsdp_{name}") for name in names})
        self._settings.fill(self, [name for name in names if name not in _DEPENDENT])
        if self.fsdp_version is None:
            self.fsdp_version = 1
        if self.fsdp_version not in (1, 2):
            raise ConfigError(f"fsdp_version={self.fsdp_version!r} is unknown", do="set 1 or 2")
        self._check_units(given)
        without_effect = self._resolve()
        self.set_state_dict_type()
        self._warn_of_unused(without_effect)

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_is_used") and name not in _CHANGEABLE:
            raise UsageError(
                f"fsdp_plugin.{name} was set after an Accelerator was created with this plugin, so it would have no "
                "effect",
                do=f"pass it to FullyShardedDataParallelPlugin({name}=)",
            )
        super().__setattr__(name, value)

    # ---- the steps of the constructor ---------------------------------------------------------------------------------

    def _resolve(self) -> list[str]:
        """Convert the fields to their final types; return the options that have no effect."""
        self._resolve_strategy()
        self._resolve_units()
        self._resolve_offload()
        if not (self.ignored_modules is None or isinstance(self.ignored_modules, str)):
            self.ignored_modules = list(self.ignored_modules)
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.cpu_ram_efficient_loading = bool(self.cpu_ram_efficient_loading)
        self.activation_checkpointing_offload = bool(self.activation_checkpointing_offload)
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigError(
                "activation_checkpointing_offload has no effect without activation_checkpointing",
                where=self._where("activation_checkpointing_offload"),
                do="set activation_checkpointing=True, too",
            )
        return self._resolve_precision()

    def _resolve_strategy(self) -> None:
        strategy, reshard = self.sharding_strategy, self.reshard_after_forward
        if strategy is None and reshard is None:
            first, second = ("sharding_strategy", "reshard_after_forward")[:: 1 if self.fsdp_version == 1 else -1]
            # accelerate's launcher sets both, and each version reads its own.
            name = second if second in self._settings.found and first not in self._settings.found else first
            default = "FULL_SHARD" if self.fsdp_version == 1 else True
            value = self._settings.found[name].value if name in self._settings.found else default
            strategy, reshard = (value, None) if name == "sharding_strategy" else (None, value)
        if strategy is not None:
            strategy = _strategy("sharding_strategy", strategy)
        if reshard is not None:
            reshard = _resharding(reshard, version=self.fsdp_version)
            if isinstance(reshard, ShardingStrategy):
                if strategy not in (None, reshard):
                    raise _contradiction(strategy, reshard.name)
                strategy, reshard = reshard, None
        if strategy is not None:
            implied = strategy in _RESHARDING
            if reshard is not None and bool(reshard) is not implied:
                raise _contradiction(strategy, reshard)
            reshard = implied if reshard is None else reshard
        self.sharding_strategy, self.reshard_after_forward = strategy, reshard

    def _check_units(self, given: frozenset[str]) -> None:
        """Check that the fields set in code (``given``) do not define units in two ways."""
        policy = self._value("auto_wrap_policy")
        belongs = {"transformer_cls_names_to_wrap": "TRANSFORMER_BASED_WRAP", "min_num_params": "SIZE_BASED_WRAP"}
        kind = _shown(policy).upper()
        if policy is transformer_auto_wrap_policy:  # the resolved value of the field
            kind = belongs["transformer_cls_names_to_wrap"]
        elif policy is size_based_auto_wrap_policy:
            kind = belongs["min_num_params"]
        used = [name for name in belongs if name in given and getattr(self, name)]
        if policy is None and len(used) > 1:
            raise ConfigError(f"{' and '.join(used)} both define the FSDP units", do="set one of them")
        for name in used:
            if policy is not None and kind != belongs[name]:
                raise ConfigError(
                    f"{name} has no effect with auto_wrap_policy={kind}",
                    do=f"remove {name}, or set auto_wrap_policy={belongs[name]!r}",
                )

    def _resolve_units(self) -> None:
        policy = self._value("auto_wrap_policy")
        classes: Any = self.transformer_cls_names_to_wrap
        size = self.min_num_params
        if policy is None and not size and classes is None:
            classes = self._value("transformer_cls_names_to_wrap")
        if policy is None and (classes or size):
            policy = "TRANSFORMER_BASED_WRAP" if classes else "SIZE_BASED_WRAP"
        if isinstance(policy, str):
            policy = self._policy(policy)
        elif not (policy is None or callable(policy)):
            raise ConfigError(
                f"auto_wrap_policy is a {type(policy).__name__}, which is not callable",
                do="pass a function that takes a module and returns a bool",
            )
        if policy is transformer_auto_wrap_policy:
            classes = self._value("transformer_cls_names_to_wrap")
            if isinstance(classes, str):
                classes = [name.strip() for name in classes.split(",") if name.strip()]
            self.transformer_cls_names_to_wrap = None if classes is None else list(classes)
        self.auto_wrap_policy = policy

    def _policy(self, name: str) -> Callable[..., bool]:
        """Return the torch policy with this name."""
        if name.upper() not in FSDP_AUTO_WRAP_POLICY:
            raise _unknown("auto_wrap_policy", name, FSDP_AUTO_WRAP_POLICY)
        if name.upper() == "NO_WRAP":
            return wrap_nothing
        if name.upper() == "TRANSFORMER_BASED_WRAP":
            return transformer_auto_wrap_policy
        size: Any = self._settings.typed("min_num_params", self._value("min_num_params") or 0)
        self.min_num_params = size
        if not size:
            raise ConfigError(
                "auto_wrap_policy='size_based_wrap' requires a size",
                where=self._where("auto_wrap_policy"),
                do="set min_num_params, the number of parameters above which a module becomes a separate unit (such "
                "as 1_000_000)",
            )
        return size_based_auto_wrap_policy

    def _resolve_offload(self) -> None:
        offload = self.cpu_offload or False
        if isinstance(offload, bool):
            if self.fsdp_version == 1:
                offload = CPUOffload(offload_params=offload)
            else:
                offload = CPUOffloadPolicy() if offload else OffloadPolicy()
        if not isinstance(offload, CPUOffload | OffloadPolicy):
            raise ConfigError(f"cpu_offload={offload!r} is invalid", do="set True, CPUOffload or CPUOffloadPolicy")
        self.cpu_offload = offload

    def _resolve_precision(self) -> list[str]:
        """Convert the policy to a torch policy; return its settings that have no effect."""
        policy = self.mixed_precision_policy
        without_effect = []
        if isinstance(policy, str):
            self.set_mixed_precision(policy, override=True)
        elif isinstance(policy, Mapping):
            known = {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}
            for name in policy:
                if name not in known | {"buffer_dtype"}:
                    raise _unknown("mixed_precision_policy", name, sorted(known))
            if policy.get("buffer_dtype") is not None:
                without_effect.append("mixed_precision_policy['buffer_dtype'] (buffers keep their dtype)")
            values = {name: _dtype(name, value) for name, value in policy.items() if name.endswith("_dtype")}
            param, output = values.get("param_dtype"), values.get("output_dtype")
            reduce = values["reduce_dtype"] if "reduce_dtype" in values else _reduce_dtype(param)
            cast = bool(policy.get("cast_forward_inputs", True))
            self.mixed_precision_policy = MixedPrecisionPolicy(param, reduce, output, cast)
        elif isinstance(policy, MixedPrecision):
            if policy.buffer_dtype is not None:
                without_effect.append("mixed_precision_policy.buffer_dtype (buffers keep their dtype)")
            if policy.keep_low_precision_grads:
                without_effect.append(
                    "mixed_precision_policy.keep_low_precision_grads (gradients have the parameter's dtype)"
                )
        elif policy is not None and not isinstance(policy, MixedPrecisionPolicy):
            raise ConfigError(
                f"mixed_precision_policy is a {type(policy).__name__}",
                do="set a name such as 'bf16', a dict of dtypes, or a MixedPrecisionPolicy",
            )
        return without_effect

    def _warn_of_unused(self, without_effect: list[str]) -> None:
        """Warn once about all options that have no effect."""
        for name, (neutral, why) in _OBSOLETE.items():
            value = getattr(self, name)
            if value is not None and value != neutral and str(value).upper() != neutral:
                without_effect.append(f"{name} ({why})")
        if without_effect:
            _logger.warning(
                N_("FullyShardedDataParallelPlugin: options that have no effect with torch's fully_shard: %s"),
                "; ".join(without_effect),
            )

    def _value(self, name: str) -> Any:
        """Return the value of the argument ``name``, or of the setting that stands for it, or None."""
        given = getattr(self, name)
        return self._settings.found[name].value if given is None and name in self._settings.found else given

    def _where(self, name: str) -> str:
        return str(self._settings.origin(name))

    # ---- Accelerate's methods -----------------------------------------------------------------------------------------

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose whether state is saved in full or in shards. None: the given value, the setting, or the default."""
        given = state_dict_type if state_dict_type is not None else self._value("state_dict_type")
        value = given or ("FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT")
        kind = value
        if not isinstance(value, StateDictType):
            kind = _numbered("state_dict_type", value, FSDP_STATE_DICT_TYPE, tuple(StateDictType))
        if kind is StateDictType.LOCAL_STATE_DICT:
            raise ConfigError(
                "state_dict_type='LOCAL_STATE_DICT' is not supported with torch's fully_shard",
                where=self._where("state_dict_type"),
                do="set SHARDED_STATE_DICT or FULL_STATE_DICT",
            )
        if given is not None and kind is StateDictType.SHARDED_STATE_DICT:
            _logger.warning(
                N_(
                    "state_dict_type=SHARDED_STATE_DICT: this version writes full tensors, which rank zero gathers one at a time "
                    "and which can be loaded on any number of ranks"
                )
            )
        self.state_dict_type = kind

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Use ``mixed_precision`` (a name or a dtype) if no policy was given, or in any case with ``override``.

        Args:
            mixed_precision: dtype of parameters and inputs; gradients are reduced in float32.
            buffer_autocast: has no effect, because buffers keep their dtype.
            override: replace an existing policy.
        """
        if override or self.mixed_precision_policy is None:
            dtype = _dtype("mixed_precision", mixed_precision)
            self.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_reduce_dtype(dtype))

    # ---- for the engine -----------------------------------------------------------------------------------------------

    def sharding_options(
        self, world: World, *, mixed_precision: str, replicas: int | None = None, num_holders: int | None = None
    ) -> ShardingOptions:
        """Return the engine's options; afterwards, only options for saving may change.

        Args:
            world: ranks and machines; a hybrid strategy shards within each machine.
            mixed_precision: the run's precision, used if the plugin has no policy.
            replicas: number of replicas set in ``ParallelismConfig``. None: determined by the strategy.
            num_holders: number of ranks that hold a copy or a shard of the same parameters. None: all ranks.

        Raises:
            ConfigError: the ranks cannot be divided this way.
        """
        if not self._is_used:
            self._resolve()  # fields may have changed since
        self._is_used = True
        policy = self.mixed_precision_policy
        dtype = None if mixed_precision == "no" else _DTYPES[mixed_precision]
        if policy is None:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_reduce_dtype(dtype))
        if isinstance(policy, MixedPrecision):
            cast = policy.cast_forward_inputs or policy.cast_root_forward_inputs
            policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, None, cast)
        offload, ignored = self.cpu_offload, self.ignored_modules
        replicas = self._replicas(world, replicas)
        if world.world_size > 1:
            _check_group(self.reshard_after_forward, (num_holders or world.world_size) // replicas)
        return ShardingOptions(
            reshard_after_forward=self.reshard_after_forward,
            replicas=replicas,
            cpu_offload=offload.offload_params
            if isinstance(offload, CPUOffload)
            else isinstance(offload, CPUOffloadPolicy),
            # True is torch's default and fails on a machine without an accelerator, so only False is taken as a choice.
            pin_memory=False if isinstance(offload, CPUOffloadPolicy) and not offload.pin_memory else None,
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            output_dtype=policy.output_dtype,
            cast_forward_inputs=policy.cast_forward_inputs,
            activation_checkpointing=self._activation_mode(),
            ignored=ignored if isinstance(ignored, str) else tuple(ignored or ()),
            ram_efficient_loading=self.cpu_ram_efficient_loading,
            **self._units(),
        )

    def _activation_mode(self) -> ActivationMode:
        if not self.activation_checkpointing:
            return "none"
        return "offload" if self.activation_checkpointing_offload else "full"

    def _replicas(self, world: World, given: int | None) -> int:
        strategy = self.sharding_strategy
        own = 1
        if strategy is ShardingStrategy.NO_SHARD:
            own = world.world_size
        elif strategy in _HYBRID:
            own, left = divmod(world.world_size, world.local_world_size)
            if left:
                raise ConfigError(
                    f"{_shown(strategy)} shards within each machine, but {world.world_size} processes are not a multiple of "
                    f"the {world.local_world_size} on this machine",
                    do="start the same number of processes on every machine, or set "
                    "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)",
                )
        if given is None:
            return own
        # With a hybrid strategy and sizes, the sizes take precedence.
        if own != given and (strategy is ShardingStrategy.NO_SHARD or given in (1, world.world_size)):
            raise ConfigError(
                f"fsdp_plugin with sharding_strategy={_shown(strategy)} means {own} replicas of the model on {world.world_size} "
                f"processes, but parallelism_config sets dp_replicate_size={given}",
                where="code Accelerator(fsdp_plugin=, parallelism_config=)",
                do="remove one of them, or make them agree",
            )
        return given

    def _units(self) -> dict[str, Any]:
        """Return how units are defined, as fields of ``ShardingOptions``."""
        policy: Any = self.auto_wrap_policy
        keywords: dict[str, Any] = {}
        if isinstance(policy, functools.partial) and not policy.args:
            policy, keywords = policy.func, policy.keywords
        if policy is None:
            return {}
        if policy is transformer_auto_wrap_policy:
            classes = keywords.get("transformer_layer_cls", self.transformer_cls_names_to_wrap or ())
            return {"wrap_classes": tuple(sorted(classes, key=str))}
        if policy is size_based_auto_wrap_policy and keywords.keys() <= {"min_num_params"}:
            default = inspect.signature(size_based_auto_wrap_policy).parameters["min_num_params"].default
            return {"min_num_params": max(1, keywords.get("min_num_params", self.min_num_params or default))}
        return {"wrap_fn": _of_one_module(self.auto_wrap_policy)}


def _numbered(name: str, value: object, names: list[str], members: tuple[Any, ...]) -> Any:
    """Return the enum member whose name (in any case) or number (starting at 1) is ``value``."""
    text = str(value).upper().lstrip("_")
    if text.isdigit() and 0 < int(text) <= len(members):
        return members[int(text) - 1]
    if text in names:
        return members[names.index(text)]
    raise _unknown(name, value, names)


def _strategy(name: str, value: object) -> ShardingStrategy:
    if isinstance(value, ShardingStrategy):
        return value
    found: ShardingStrategy = _numbered(name, value, FSDP_SHARDING_STRATEGY, _STRATEGIES)
    return found


def _resharding(value: object, *, version: int) -> bool | int | ShardingStrategy:
    if isinstance(value, bool | ShardingStrategy):
        return value
    text = str(value).lower()
    if text in ("true", "false", "yes", "no", "on", "off"):
        return bool(str_to_bool(text))
    if version == 1 or not text.isdigit():
        return _strategy("reshard_after_forward", value)
    is_word = isinstance(value, str) and int(text) < 2  # "1" and "0", written for True and False
    return text == "1" if is_word else int(text)


def _check_group(reshard: bool | int, shards: int) -> None:
    if not isinstance(reshard, bool) and (reshard < 1 or shards % reshard):
        raise ConfigError(
            f"reshard_after_forward={reshard} does not divide the {shards} ranks across which the model is sharded",
            do="set reshard_after_forward to True, False, or a divisor of that number",
        )


def _dtype(name: str, value: object) -> torch.dtype | None:
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if isinstance(dtype, torch.dtype):
        return dtype
    if value is None and name != "mixed_precision":
        return None
    raise _unknown(name, value, list(_DTYPES))


def _reduce_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype for reducing gradients; over hundreds of ranks, bf16 would lose most of its precision."""
    return None if dtype is None else torch.float32


def _of_one_module(policy: Callable[..., Any]) -> Callable[[nn.Module], bool]:
    """Return ``policy`` as a function that takes only a module; FSDP1 policies take three arguments."""
    try:
        inspect.signature(policy).bind(module=None, recurse=False, nonwrapped_numel=0)
    except (TypeError, ValueError):  # other arguments, or implemented in C without a signature
        return policy
    return functools.partial(_call_policy, policy)


def _call_policy(policy: Callable[..., Any], module: nn.Module) -> bool:
    numel = sum(parameter.numel() for parameter in module.parameters())
    return bool(policy(module=module, recurse=False, nonwrapped_numel=numel))


def _shown(value: object) -> str:
    return str(getattr(value, "name", getattr(value, "__name__", value))).lstrip("_")


def _contradiction(strategy: ShardingStrategy, reshard: object) -> ConfigError:
    return ConfigError(
        f"sharding_strategy={_shown(strategy)} and reshard_after_forward={reshard} contradict each other",
        where="code FullyShardedDataParallelPlugin(sharding_strategy=, reshard_after_forward=)",
        do="set only one of them; FULL_SHARD corresponds to True, SHARD_GRAD_OP to False",
    )


def _unknown(name: str, value: object, known: list[str]) -> ConfigError:
    near = get_close_matches(str(value).upper(), [one.upper() for one in known], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"{name}={value!r} is unknown", do=f"{hint}use one of {', '.join(known)}")
