"""Options for the torch components that the Accelerator uses, with Accelerate's names and defaults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch

from echelon.base.errors import ConfigError
from echelon.base.keywords import suggest_keywords
from echelon.base.optional import require
from echelon.compat.enums import DDPCommunicationHookType
from echelon.config.plugin_arguments import plugin_arguments
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.engines.comm_hooks import register_comm_hook
from echelon.precision.float8 import check_fp8_device

ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]


@dataclass
class KwargsHandler:
    """Base class of handlers, whose fields are keyword arguments."""

    _UNSET: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Values of the fields that are filled from the run's settings, if no setting is given."""

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of the fields."""
        return copy.deepcopy({f.name: getattr(self, f.name) for f in fields(self)})

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, including those that settings filled."""
        default = {**type(self)(**self._UNSET).to_dict(), **self._UNSET}
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


@suggest_keywords
@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


@suggest_keywords
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel``."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """Gradient compression hook."""
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """``FP16`` or ``BF16``: additionally cast what ``comm_hook`` sends."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``PowerSGDState``."""

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return a deep copy of DDP's own arguments."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Register ``comm_hook`` on ``model``; does nothing for NO.

        Raises:
            ConfigError: the hook and the wrapper cannot be combined.
        """
        register_comm_hook(
            model,
            hook=str(DDPCommunicationHookType(self.comm_hook)),
            wrapper=str(DDPCommunicationHookType(self.comm_wrapper)),
            state_options=self.comm_state_option,
        )


@suggest_keywords
@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@suggest_keywords
@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Process group options."""

    backend: str | None = "nccl"
    """Process group backend; the default selects the one for the device, such as gloo on a CPU."""
    init_method: str | None = None
    timeout: timedelta | None = None
    """Timeout for collectives. The default value (10 minutes with nccl, else 30) selects the default of ``setup``."""

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)


@suggest_keywords
@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao trains in fp8; requires the ``fp8`` extra."""

    config: Any = None
    """A ``torchao.float8.Float8LinearConfig``. None: build it from ``enable_fsdp_float8_all_gather`` and
    ``pad_inner_dim``."""
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    """Function that takes a module and its name, and returns whether to convert the module. None: every Linear except the
    first and last."""
    pad_inner_dim: bool | None = None
    """Whether to pad inner dimensions to the multiple that fp8 requires. None: use the setting, else True."""
    enable_fsdp_float8_all_gather: bool | None = None
    """Whether FSDP all-gathers weights in fp8. None: use the setting, else True."""

    _UNSET = MappingProxyType({"pad_inner_dim": True, "enable_fsdp_float8_all_gather": True})

    def __post_init__(self) -> None:
        float8 = require("torchao.float8", extra="fp8", purpose="mixed_precision='fp8' (AORecipeKwargs)")
        if self.config is not None:
            return
        plugin_arguments(self, {name: f"fp8_{name}" for name in self._UNSET}).fill(self, self._UNSET)
        for name in self._UNSET:
            if getattr(self, name) is None:
                setattr(self, name, True)
        self.config = float8.Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )


def fp8_recipe(
    given: AORecipeKwargs | None, config: Resolved[RunConfig], *, device: torch.device
) -> AORecipeKwargs | None:
    """Return the fp8 recipe for the run's precision on ``device``: ``given``, torchao's default for fp8, or None.

    Raises:
        ConfigError: the run does not use fp8, the backend is not torchao, or the device does not support fp8.
        MissingExtraError: torchao is not installed.
    """
    precision, backend = config.value.mixed_precision, config.value.fp8_backend
    if precision != "fp8":
        if given is not None:
            raise ConfigError(
                f"kwargs_handlers contains an AORecipeKwargs, but mixed_precision={precision!r}",
                where="code Accelerator(kwargs_handlers=)",
                do="set mixed_precision='fp8', or remove the recipe",
            )
        return None
    if given is None and backend not in (None, "AO", "NO"):
        raise ConfigError(
            f"fp8 with {backend} is not supported: echelon only supports torchao for fp8",
            where=str(config.origins["fp8_backend"]),
            do="set it to AO, or remove it",
        )
    recipe = given or AORecipeKwargs()
    check_fp8_device(recipe.config, device=device)
    return recipe


@suggest_keywords
@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile``."""

    activities: list[ProfilerActivity] | None = None
    """Activities to record. None: all that this machine supports."""
    schedule_option: dict[str, int] | None = None
    """``torch.profiler.schedule`` arguments. None: record everything."""
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    """Folder to which ``Accelerator.profile`` writes one trace per rank."""

    def build(self) -> torch.profiler.profile:
        """Return the profiler without starting it.

        Raises:
            ConfigError: torch does not support an activity.
        """
        return torch.profiler.profile(
            activities=None if self.activities is None else [_activity(name) for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _activity(name: str) -> torch.profiler.ProfilerActivity:
    known = [one for one in get_args(ProfilerActivity) if hasattr(torch.profiler.ProfilerActivity, one.upper())]
    if name not in known:
        raise ConfigError(f"{name!r} is not a profiler activity", do=f"use one of {', '.join(known)}")
    activity: torch.profiler.ProfilerActivity = getattr(torch.profiler.ProfilerActivity, name.upper())
    return activity
