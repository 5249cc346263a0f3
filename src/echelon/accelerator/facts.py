"""What an Accelerator is and was told: the part of its interface that only reads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from echelon.accelerator.plugins.configuration import DataLoaderConfiguration
from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin
from echelon.accelerator.plugins.kwargs_handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.process_facts import ProcessFacts
from echelon.accelerator.profiling import ProfileKwargs
from echelon.accelerator.setup.build_deepspeed import DeepSpeedUse
from echelon.base.capabilities import Capabilities
from echelon.base.errors import UsageError
from echelon.compat.enums import DistributedType, FP8BackendType
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.engines.base import Engine
from echelon.world.world import World

__all__ = ["AcceleratorFacts"]

T = TypeVar("T")


def _given(kind: type[KwargsHandler]) -> Any:
    return property(
        lambda accelerator: next((h for h in accelerator._handlers if isinstance(h, kind)), None),
        doc=f"The ``{kind.__name__}`` that was given; None: none.",
    )


def _no_axis(name: str) -> UsageError:
    return UsageError(
        f"there is no {name}: no parallelism_config was given",
        do="use process_index: every process has its own part of the data",
    )


class AcceleratorFacts(ProcessFacts):
    """The base of ``Accelerator``: facts of the process, settings, and what this version does not have."""

    _config: Resolved[RunConfig]
    _engine: Engine
    _deepspeed: DeepSpeedUse
    _handlers: tuple[KwargsHandler, ...]
    ao_recipe_handler: AORecipeKwargs | None
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _layout: ParallelismConfig | None

    # ---- who am I ----------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The facts about this process."""
        return self._world

    @property
    def config(self) -> Resolved[RunConfig]:
        """The settings of the run, each with its origin."""
        return self._config

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self._engine.capabilities

    @property
    def multi_device(self) -> bool:
        """Are there several processes, each with an accelerator of its own? (Accelerate's word: no, on CPUs.)"""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def should_save_model(self) -> bool:
        """Does this process write the model: one of each machine."""
        return self.is_local_main_process

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is spread, in Accelerate's words; for scripts that print or compare it."""
        special = self._engine.capabilities.distributed_type
        return (
            DistributedType(special) if special else DistributedType.of(self.device, distributed=self.use_distributed)
        )

    @property
    def parity(self) -> str:
        """``off`` or ``exact``: what the update depends on."""
        return self._config.value.parity

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``."""
        return self._config.value.mixed_precision

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8: torchao, or none without fp8."""
        return FP8BackendType.NO if self.ao_recipe_handler is None else FP8BackendType.AO

    @property
    def native_amp(self) -> bool:
        """Do models run under autocast?"""
        return self.mixed_precision != "no"

    # What was given as kwargs_handlers; None: torch's defaults. Read only: the engine has been made with them.
    autocast_handler = _given(AutocastKwargs)
    ddp_handler = _given(DistributedDataParallelKwargs)
    init_handler = _given(InitProcessGroupKwargs)
    profile_handler = _given(ProfileKwargs)
    scaler_handler = _given(GradScalerKwargs)

    # ---- layouts, and what this version does not have ----------------------------------------------------------------

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """As ``is_fsdp2``, in Accelerate's words: may sharding be combined with other axes?"""
        return self.capabilities.replaces_parameters

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's settings; None: nothing asks for it."""
        return self._deepspeed.plugin

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many ranks are on each axis; None: it was not asked for."""
        return self._layout

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of ``parallelism_config``; None: without one, or where no axis has two ranks."""
        return None if self._layout is None else self._layout.device_mesh

    @property
    def data_parallel_rank(self) -> int:
        """The place on the axis ``dp_replicate`` of ``parallelism_config``. Raises: there is none."""
        return self._place("data_parallel_rank", "dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The place on the axis ``dp_shard`` of ``parallelism_config``. Raises: there is none."""
        return self._place("data_parallel_shard_rank", "dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """The place on the axis ``tp`` of ``parallelism_config``. Raises: there is none."""
        return self._place("tensor_parallel_rank", "tp")

    def _place(self, name: str, axis: str) -> int:
        if self._layout is None:
            raise _no_axis(name)
        mesh = self._layout.device_mesh
        return mesh.get_local_rank(axis) if mesh is not None and axis in self._layout.active_mesh_dims else 0

    @property
    def context_parallel_rank(self) -> int:
        """The place on the axis ``cp`` of ``parallelism_config``. Raises: there is none (nor in Accelerate)."""
        raise _no_axis("context_parallel_rank")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The place in a pipeline. Raises: there is none (nor in Accelerate)."""
        raise _no_axis("pipeline_parallel_rank")

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return the context that cuts sequences over the ranks where ``parallelism_config`` says so: here an empty one."""
        return nullcontext()

    def deepspeed_ulysses_dl_adapter(self, dl: T, model: nn.Module) -> T:
        """Return ``dl``: sequences are cut over the ranks where ``parallelism_config`` says so only."""
        return dl

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raise: LOMO, which updates the parameters inside the backward pass, is not offered."""
        raise UsageError(
            "lomo_backward() is not offered: LOMO updates the parameters inside the backward pass, rank by rank",
            do="use an optimizer with a step(), and backward(loss)",
        )

    # ---- settings ----------------------------------------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def dispatch_batches(self) -> bool | None:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.dispatch_batches

    @property
    def use_stateful_dataloader(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.non_blocking

    @property
    def project_dir(self) -> Any:
        """Where the run keeps its files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration
