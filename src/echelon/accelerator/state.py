"""``PartialState`` and ``AcceleratorState``: read-only views of this process's rank, device and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.accelerator.current import current_accelerator, has_accelerator
from echelon.accelerator.plugins.configuration import TorchDynamoPlugin
from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.process import ProcessMembers
from echelon.accelerator.views import view
from echelon.base.device import use_device
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.compat.enums import DistributedType
from echelon.config.sources import current, from_code, set_debug
from echelon.distributed import control
from echelon.distributed.setup import cleanup, setup
from echelon.world.environment import detect
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin


_FACTS = (
    "distributed_type",
    "backend",
    "num_processes",
    "process_index",
    "local_process_index",
    "device",
    "debug",
)


class _SharedState:
    """Accelerate's shared dict: a copy of the state's attributes, or empty before a state exists."""

    def __get__(self, state: object, kind: type[PartialState]) -> dict[str, Any]:
        known = kind._known()
        return {} if known is None else {name: getattr(known, name) for name in kind._facts}


class PartialState(ProcessMembers):
    """Rank and device of this process, under Accelerate's names. All instances are equivalent and stateless.

    Args:
        cpu: use the CPU even if an accelerator is available.
        kwargs: ``backend``, ``timeout`` and ``init_method`` for the process group, if it does not exist yet.

    Collective: construct on every rank, because the first instance creates the process group.

    Raises:
        UsageError: an argument is unknown.
    """

    _facts: ClassVar[tuple[str, ...]] = _FACTS
    _shared_state = _SharedState()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        if unknown := kwargs.keys() - {"backend", "timeout", "init_method"}:
            raise UsageError(
                f"{type(self).__name__}() got unexpected arguments: {', '.join(sorted(unknown))}",
                do="pass cpu, backend, timeout or init_method",
            )
        use_cpu = current(from_code("PartialState", {"cpu": cpu or None})).value.cpu
        if not dist.is_initialized() and detect().world_size > 1:
            setup(**kwargs)
        self._world = World.current(cpu=use_cpu)

    @property
    def backend(self) -> str | None:
        """The process group's backend; None without a process group."""
        return self._world.backend if self.use_distributed else None

    @property
    def debug(self) -> bool:
        """Whether every collective checks shapes first. Setting this applies to this process and its children."""
        return current().value.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        set_debug(debug)

    @property
    def fork_launched(self) -> bool:
        """Always False, because forked ranks need no special handling."""
        return False

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is distributed and on which device; the engine may refine it (``Accelerator.distributed_type``)."""
        return DistributedType.of(self._world.device, distributed=self.use_distributed)

    def wait_for_everyone(self) -> None:
        """Wait for all processes. Collective."""
        control.barrier()

    @property
    def initialized(self) -> bool:
        """Always True, because a view needs no initialization."""
        return True

    @property
    def default_device(self) -> torch.device:
        """The device that a single process would use."""
        return World.current().device

    def set_device(self) -> None:
        """Make this process's device the current device.

        Examples:
            >>> PartialState().set_device()
        """
        use_device(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy ``group``, or the default process group if None.

        Examples:
            >>> PartialState().destroy_process_group()
        """
        if group is None:
            cleanup()
        else:
            dist.destroy_process_group(group)

    @classmethod
    def _known(cls) -> PartialState | None:
        """Return the state if a process group or an Accelerator exists, without creating a process group."""
        return cls() if dist.is_initialized() or has_accelerator() else None

    @staticmethod
    def _reset_state() -> None:
        """Do nothing, because a view holds no state."""

    def __repr__(self) -> str:
        return "".join(f"{name}: {getattr(self, name)}\n" for name in self._facts)


class AcceleratorState(PartialState):
    """The rank, device and settings of the Accelerator built last, under Accelerate's names.

    Arguments have the same meaning as in ``Accelerator`` and must match the Accelerator's values.

    Raises:
        UsageError: there is no Accelerator, or an argument differs from the Accelerator's value.
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self._accelerator = current_accelerator()
        given = {
            "dynamo_plugin": dynamo_plugin,
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
            "cpu": (cpu and self._accelerator.device.type != "cpu") or None,
            **kwargs,
        }
        for name, value in given.items():
            if value is not None:
                raise UsageError(
                    f"AcceleratorState({name}=) was called after the Accelerator was created",
                    do=f"pass it to Accelerator({name}=)",
                )
        if mixed_precision is not None and mixed_precision != self._accelerator.mixed_precision:
            raise UsageError(
                _(
                    "AcceleratorState(mixed_precision={mixed_precision!r}) does not match the Accelerator, which uses "
                    "{accelerator_mixed_precision!r}",
                    mixed_precision=mixed_precision,
                    accelerator_mixed_precision=self._accelerator.mixed_precision,
                ),
                do=_("set it only in Accelerator(mixed_precision=...)"),
            )
        self._world = self._accelerator.world

    @classmethod
    def of(cls, accelerator: Any) -> AcceleratorState:
        """Return a view of ``accelerator``, even if another one was built later."""
        state = cls.__new__(cls)
        state._accelerator = accelerator
        state._world = accelerator.world
        return state

    mixed_precision: str = view("_accelerator.mixed_precision", "``no``, ``fp16``, ``bf16`` or ``fp8``.")
    dynamo_plugin: TorchDynamoPlugin = view("_accelerator.dynamo_plugin", "How prepared models are compiled.")
    distributed_type: DistributedType = view(
        "_accelerator.distributed_type", "How the run is distributed, according to the engine."
    )

    _facts = (*_FACTS, "mixed_precision")

    # Unsupported plugins are None, as in Accelerate if they are not configured.
    megatron_lm_plugin: None = None
    torch_tp_plugin: None = None

    deepspeed_plugin: DeepSpeedPlugin | None = view(
        "_accelerator.deepspeed_plugin", "DeepSpeed settings; None if it is not used."
    )
    deepspeed_plugins: DeepSpeedPlugin | None = view(
        "_accelerator.deepspeed_plugin", "Same as ``deepspeed_plugin``, because an Accelerator has only one."
    )
    fsdp_plugin: FullyShardedDataParallelPlugin | None = view(
        "_accelerator.fsdp_plugin", "Model sharding settings; None without sharding."
    )
    parallelism_config: ParallelismConfig | None = view(
        "_accelerator.parallelism_config", "Number of ranks on each mesh axis; None if not configured."
    )
    device_mesh: DeviceMesh | None = view("_accelerator.torch_device_mesh", "The mesh of ``parallelism_config``.")
    is_fsdp2: bool = view("_accelerator.capabilities.replaces_parameters", "Whether parameters are sharded.")

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return the only plugin, regardless of ``name``. Raises UsageError if there is none."""
        if self.deepspeed_plugin is None:
            raise _no_deepspeed("get_deepspeed_plugin()")
        return self.deepspeed_plugin

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Do nothing, because there is only one plugin. Raises UsageError if there is none."""
        if self.deepspeed_plugin is None:
            raise _no_deepspeed("select_deepspeed_plugin()")

    @classmethod
    def _known(cls) -> PartialState | None:
        return cls() if has_accelerator() else None

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Do nothing, because each Accelerator has its own settings."""


def _no_deepspeed(function: str) -> UsageError:
    return UsageError(
        f"{function}: there is no DeepSpeed plugin", do="pass Accelerator(deepspeed_plugin=DeepSpeedPlugin())"
    )


def is_initialized() -> bool:
    """Return whether an Accelerator exists, which ``AcceleratorState()`` requires."""
    return has_accelerator()
