"""The state of a training run that the Accelerator's modules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from echelon.accelerator.epochs import Epochs
from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.master_weights import MasterWeights
from echelon.accelerator.plugins.configuration import DataLoaderConfiguration, TorchDynamoPlugin
from echelon.accelerator.plugins.kwargs_handlers import AORecipeKwargs, KwargsHandler
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.preemption import PreemptionHandler
from echelon.accelerator.prepare.build_deepspeed import DeepSpeedSettings
from echelon.accelerator.prepared_objects import PreparedObjects
from echelon.accelerator.unprepared_model import UnpreparedModelCheck
from echelon.accelerator.update.direct_backward import DirectBackwardCheck
from echelon.accelerator.update.unprepared_optimizer import UnpreparedOptimizerGuard
from echelon.accelerator.update.update_policy import UpdatePolicy
from echelon.base.capabilities import Capabilities
from echelon.base.progress import Progress
from echelon.compat.enums import DistributedType
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.distributed import control
from echelon.distributed.peer_responder import Watcher
from echelon.distributed.record.recorder import recorder_of_process
from echelon.engines.base import Engine
from echelon.precision.policy import PrecisionPolicy
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
    from echelon.accelerator.update.live_check.live_check import LiveCheck
    from echelon.engines.expert_parallel.routers import RoutingGaps
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages


@dataclass(kw_only=True, eq=False)
class Session:
    """Holds each part of a run's state exactly once; each part has its own interface."""

    config: Resolved[RunConfig]
    world: World
    """All ranks."""
    data_world: World
    """The ranks that read different samples: without those that differ only on other axes of the mesh."""
    engine: Engine
    precision: PrecisionPolicy
    deepspeed: DeepSpeedSettings
    handlers: tuple[KwargsHandler, ...]
    """Handlers passed as ``kwargs_handlers``."""
    layout: ParallelismConfig | None
    fsdp_plugin: FullyShardedDataParallelPlugin | None
    dynamo_plugin: TorchDynamoPlugin
    ao_recipe_handler: AORecipeKwargs | None
    dataloader_config: DataLoaderConfiguration
    project: ProjectConfiguration
    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: list[Any]
    gradient_state: GradientState
    counters: Progress
    """Counters kept by the update policy; see ``progress``."""
    objects: PreparedObjects
    unprepared: UnpreparedModelCheck
    update: UpdatePolicy
    preemption: PreemptionHandler = field(default_factory=PreemptionHandler)
    """Decides where the run may stop on preemption."""
    live_check: LiveCheck | None = None
    """Checks every N-th update (``verify_every``)."""
    stages: PipelineStages | None = None
    """This rank's stages of the model (``prepare_pipeline``)."""
    routing: RoutingGaps | None = None
    """Gaps between chosen and rejected experts (``parity="exact"``)."""
    watcher: Watcher | None = None
    """Answers other ranks that check whether this rank is alive."""
    logged_schedulers: set[type] = field(default_factory=set)
    """Scheduler classes whose steps per update have been logged."""
    masters: MasterWeights = field(default_factory=MasterWeights)
    """Which weights train in float32 though they were loaded in low precision."""
    warned_of_low_precision: bool = False
    """Whether a warning has said that the optimizers step low-precision weights."""
    num_readers: int = field(init=False)
    """The number of ranks that read different samples; ranks that differ on other axes of the mesh count once."""
    epochs: Epochs = field(init=False)
    guard: UnpreparedOptimizerGuard = field(init=False)
    direct_backward: DirectBackwardCheck = field(init=False)
    backward: Callable[[torch.Tensor, float | None, Mapping[str, Any]], None] = field(init=False)
    """Runs a backward pass of the update: the policy's, checked if ``verify_every`` is set."""
    _steps_before: int = 0  # optimizer steps that the current optimizers have not counted

    def __post_init__(self) -> None:
        self.num_readers = self.data_world.world_size
        self.gradient_state.reading.driver = self.update.driver
        self.epochs = self.update.epochs = Epochs(
            state=self.gradient_state,
            progress=self.counters,
            objects=self.objects,
            preemption=self.preemption,
            is_exact=self.parity != "off",
            device_type=self.world.device.type,
            on_batch=None if self.live_check is None else self.live_check.note_batch,
        )
        contribution = None if self.update.driver is None else self.update.driver.contribution
        self.backward = self.update.backward
        if self.live_check is not None:
            self.live_check.attach(self.update, contribution)
            self.backward = self.live_check.run_backward
        self.guard = UnpreparedOptimizerGuard(
            engine=self.engine,
            models=self.objects.models,
            state=self.gradient_state,
            parity=self.parity,
            scaler=self.update.scaler,
            num_processes=self.world.world_size,
            unprepared=self.unprepared,
        )
        self.direct_backward = DirectBackwardCheck(
            state=self.gradient_state,
            spike_guard=self.config.value.spike_guard,
            parity=self.parity,
            num_processes=self.world.world_size,
            contribution=contribution,
        )

    def __getstate__(self) -> dict[str, Any]:
        built = dict.fromkeys(("watcher", "epochs", "guard", "direct_backward", "backward"))
        return {**vars(self), **built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    # ---- settings ----------------------------------------------------------------------------------------------------

    @property
    def parity(self) -> str:
        """``off``, ``exact`` or ``bitwise``."""
        return self.config.value.parity

    @property
    def capabilities(self) -> Capabilities:
        """The engine's capabilities."""
        return self.engine.capabilities

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's ``DistributedType`` of this run."""
        special = self.engine.capabilities.distributed_type
        if special:
            return DistributedType(special)
        return DistributedType.of(self.world.device, distributed=self.world.world_size > 1)

    def handler(self, kind: type[KwargsHandler]) -> Any:
        """Return the configured handler of this type, or None."""
        return next((handler for handler in self.handlers if isinstance(handler, kind)), None)

    @property
    def select_tensors(self) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
        """Function that returns the tensors of this rank's stages; None if each rank has the whole model."""
        return None if self.stages is None else self.stages.own_tensors

    def on_any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank, also of those that share samples. Collective: call on every rank."""
        return control.agree(flag)

    # ---- progress ----------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The run's position."""
        self.counters.step = self._steps_before + self.objects.num_steps()
        return self.counters

    def restore_progress(self, counters: dict[str, Any] | None) -> None:
        """Continue from a checkpoint's ``counters``; None if the checkpoint has none."""
        if counters is not None:
            self.counters.load_json(counters)
            self._steps_before = self.counters.step - self.objects.num_steps()
            recorder = recorder_of_process()
            if recorder is not None:
                recorder.resume(self.counters.step, num_steps=self.objects.num_steps())
                recorder.resumed(self.counters.step)

    def resume_epochs(self) -> int:
        """Make the loaders continue at the run's position; return its epoch."""
        epoch, is_repeated = self.epochs.resume_passes()
        if is_repeated:
            self.update.step -= self.update.step % self.gradient_state.num_steps
        return epoch

    def run_final_checks(self) -> None:
        """At the end of a run, check for ungathered metrics and for weights that differ between ranks."""
        self.gradient_state.reading.metrics.check()
        if self.live_check is not None:
            self.live_check.finish()
        if self.routing is not None:
            self.routing.report(self.world)
        self.guard.compare_models("at end_training()", is_last=True)
        self.guard.drift.stop()
        self.update.drop_update()

    def forget_objects(self) -> None:
        """Release all prepared objects, but keep the count of optimizer steps."""
        self.update.drop_update()
        self.gradient_state.reading.forget_loops()
        self._steps_before += self.objects.num_steps()
        recorder = recorder_of_process()
        if recorder is not None:
            recorder.resume(self._steps_before)
        self.objects.clear()
        self.guard.release()
        self.stages = None
        self.engine.release()
