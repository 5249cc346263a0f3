"""``Accelerator.prepare_pipeline``: trains a model whose layers are divided into stages on the ranks of the axis ``pp``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.accelerator.agreement import agree_on_models
from echelon.accelerator.prepare.prepare_objects import prepare_stages
from echelon.accelerator.sequences import attach_sequence_parallel
from echelon.accelerator.session import Session
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.engines.broadcast import broadcast_model
from echelon.engines.context_parallel.region import SequenceRegion, current_region

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
    from echelon.engines.pipeline_parallel.pipeline import LossFunction, PipelineStages
    from echelon.engines.pipeline_parallel.stages import StageCut


def prepare_pipeline(
    session: Session,
    model: nn.Module,
    *,
    stages: Sequence[Sequence[str]] | str | None = None,
    schedule: str = "1F1B",
    num_micro_batches: int | None = None,
    loss_fn: LossFunction | None = None,
    count_items: Callable[[Any], float] | None = None,
) -> Pipeline:
    """Divide ``model`` into stages on the ranks of the axis ``pp``, in place, and return the pipeline that trains it.

    Afterwards, prepare the optimizer, the loaders and the schedulers as ever.

    Args:
        model: the whole model: a transformers decoder, an ``nn.Sequential``, or any model whose modules form a chain.
        stages: the names of each stage's modules in the order of computation, or ``parameters`` or ``layers`` to balance their
            numbers. None: ``parameters``.
        schedule: ``GPipe``, ``1F1B``, ``Interleaved1F1B``, ``LoopedBFS``, ``InterleavedZeroBubble``, ``ZBVZeroBubble`` or
            ``DualPipeV``. The last five have two stages on each rank.
        num_micro_batches: into how many parts each batch is cut. None: twice the number of stages.
        loss_fn: takes the outputs and the batch of a micro-batch, and returns the mean loss over its items. None: the loss of the
            transformers model.
        count_items: returns the number of items (samples or tokens) of a micro-batch's batch. None: tokens with a label if
            ``loss_fn`` is None, else samples.

    Collective: call on every rank, with the same model.

    Raises:
        ConfigError: the model cannot be cut, or the settings contradict each other.

    Examples:
        >>> accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))  # doctest: +SKIP
        >>> pipeline = accelerator.prepare_pipeline(model, schedule="1F1B")  # doctest: +SKIP
        >>> optimizer, loader = accelerator.prepare(optimizer, loader)  # doctest: +SKIP
    """
    # Runs without pipelines do not import torch's, which is slow.
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages  # noqa: PLC0415
    from echelon.engines.pipeline_parallel.schedules import schedule_kind  # noqa: PLC0415
    from echelon.engines.pipeline_parallel.stages import cut_model  # noqa: PLC0415

    layout = session.layout
    if layout is None or not layout.pp_enabled:
        raise ConfigError(
            "there is no axis pp to divide the model on",
            where="prepare_pipeline()",
            do="pass Accelerator(parallelism_config=ParallelismConfig(pp_size=...)), or use prepare() and backward()",
        )
    _refuse_unsupported(session, model)
    kind = schedule_kind(schedule)
    num_stages = layout.pp_size * kind.stages_per_rank
    number = 2 * num_stages if num_micro_batches is None else num_micro_batches
    if number < 1:
        raise ConfigError(
            f"num_micro_batches={number} is below 1", where="prepare_pipeline()", do="set it to 1 or more"
        )
    cut = cut_model(model, num_stages, stages=stages)
    if session.parity != "off":
        _warn_of_batch_norms(model, number)
    agree_on_models([model])
    broadcast_model(model, session.world.device)
    assert layout.device_mesh is not None
    parts = PipelineStages(
        model,
        cut,
        kind=kind,
        group=layout.device_mesh.get_group("pp"),
        device=session.world.device,
        num_micro_batches=number,
        loss_fn=loss_fn,
        count_items=count_items,
        param_dtype=_param_dtype(session),
        layer_plan=_layer_plan(layout, model, cut) if layout.tp_enabled else None,
    )
    session.stages = parts
    session.engine.use_pipeline(parts)
    prepare_stages(session, model)
    attach_sequence_parallel(session, model, parts=[*parts.views.values()])
    pipeline = Pipeline(session, parts)
    model.forward = _EvaluationForward(model.forward, pipeline)
    return pipeline


def _refuse_unsupported(session: Session, model: nn.Module) -> None:
    if session.objects.models:
        raise UsageError(
            "a model was prepared before the pipeline, and all ranks of an axis pp belong to one pipeline",
            where="prepare_pipeline()",
            do="use one Accelerator for each model",
        )
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise UsageError(
            f"{type(model).__name__} is on the meta device, but a pipeline is cut from a model with values",
            where="prepare_pipeline()",
            do="create the model on the CPU",
        )


def _warn_of_batch_norms(model: nn.Module, num_micro_batches: int) -> None:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if norms and num_micro_batches > 1:
        warn(
            _(
                "the model has {num_norms} BatchNorm layer(s) that compute statistics per micro-batch, and a "
                "pipeline cuts each batch into {num_micro_batches}, so the update is not that of one process. Use "
                "GroupNorm or LayerNorm, or num_micro_batches=1",
                num_norms=len(norms),
                num_micro_batches=num_micro_batches,
            )
        )


def _layer_plan(layout: ParallelismConfig, model: nn.Module, cut: StageCut) -> Mapping[str, ParallelStyle]:
    """Return the style of each layer that is split; of the whole model, so that the stages of tied weights split them alike.

    Raises:
        ConfigError: stages would send each other activations that are split, or see ``resolve_plan``.
    """
    from echelon.engines.pipeline_parallel.stages import require_whole_boundaries  # noqa: PLC0415 - only for tp
    from echelon.engines.tensor_parallel.plan import resolve_plan  # noqa: PLC0415 - only for tp

    handler = layout.tp_handler
    plan = resolve_plan(model, (handler.plan if handler else None) or {}, tp_size=layout.tp_size)
    require_whole_boundaries(cut, plan)
    return plan


def _param_dtype(session: Session) -> torch.dtype | None:
    plugin = session.fsdp_plugin
    policy = None if plugin is None else plugin.mixed_precision_policy
    return getattr(policy, "param_dtype", None)


class _EvaluationForward:
    """``model.forward`` of a model in stages: without gradients, it returns what the whole model would."""

    def __init__(self, forward: Callable[..., Any], pipeline: Pipeline) -> None:
        functools.update_wrapper(self, forward, updated=())
        self._pipeline = pipeline
        self._signature = inspect.signature(forward)

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        stages = self._pipeline.stages
        if torch.is_grad_enabled():
            raise UsageError(
                f"forward() was called on {type(stages.model).__name__}, of which this rank has only some stages",
                do="call pipeline.step(batch) to train; for outputs, call the model inside torch.no_grad()",
            )
        if not stages.is_decoder:
            return self._pipeline.evaluate(args if len(args) > 1 else args[0])
        batch = {**dict(zip(self._signature.parameters, args)), **kwargs}
        is_tuple = batch.pop("return_dict", None) is False
        batch = {name: value for name, value in batch.items() if value is not None and name != "use_cache"}
        logits, loss = self._pipeline.evaluate(batch), None
        if batch.get("labels") is not None:
            loss = stages.loss_fn(logits, batch)
            if num_items_in_batch is not None:
                # A float divided by an integer tensor would be float32.
                loss = loss * stages.count_items(batch) / num_items_in_batch
        if is_tuple:
            return (logits,) if loss is None else (loss, logits)
        from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: PLC0415 - only for its models

        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Pipeline:
    """A model in stages on the ranks of the axis ``pp``; made by ``Accelerator.prepare_pipeline``."""

    def __init__(self, session: Session, stages: PipelineStages) -> None:
        self._session = session
        self.stages = stages
        self._region: SequenceRegion | None = None

    @property
    def model(self) -> nn.Module:
        """The model with only this rank's modules, which keep their full names."""
        return self.stages.model

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters, for the optimizer and for clipping."""
        return self.model.parameters()

    def train(self, mode: bool = True) -> Pipeline:
        """Set training mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set evaluation mode."""
        return self.train(False)

    def step(self, batch: Any, num_items: float | None = None, *, weight: float = 1.0) -> torch.Tensor:
        """Run the forward and backward passes of all micro-batches of ``batch``; return its mean loss.

        This replaces ``loss = model(batch)`` and ``accelerator.backward(loss)``, inside ``accumulate()`` as well.

        Args:
            batch: the same one on all ranks of the pipeline, as a prepared loader yields it.
            num_items: number of items that the loss is a mean over. None: as counted (in the exact modes), or equal weights
                for all processes and micro-steps, as in Accelerate.
            weight: factor of the loss.

        Returns:
            The mean loss over the batch's items (0-d), times ``weight``; equal on all ranks of the pipeline.

        Collective: call on every rank.
        """
        session, update = self._session, self._session.update
        contribution = None if update.driver is None else update.driver.contribution()
        if num_items is None and session.parity != "off":
            num_items = self.stages.count_items(batch)
        device = session.world.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        is_empty = contribution is not None and contribution.is_padding
        value = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
        self._region = current_region()
        loss: torch.Tensor = _LossOfSchedule.apply(value, self, batch, is_empty)  # type: ignore[no-untyped-call]
        result = loss.detach()
        self._result = result
        session.backward(loss if weight == 1.0 else loss * weight, num_items, {})
        return result if weight == 1.0 else result * weight

    def run_schedule(self, batch: Any, scale: torch.Tensor, *, is_empty: bool) -> None:
        """Run the passes of all micro-batches and set the value of the step's loss. ``step`` calls this."""
        session = self._session

        def run() -> None:
            loss = self.stages.run(batch, scale=scale, is_empty=is_empty, autocast=session.precision.autocast)
            self._result.data.fill_(loss)  # without a new version, because the loss is a part of a graph

        # torch leaves function modes while Tensor.backward runs.
        with torch.enable_grad(), nullcontext() if self._region is None else self._region:
            session.engine.run_pipeline(self.stages, run)

    def evaluate(self, batch: Any, *, gather: bool = True) -> Any:
        """Return the model's outputs for ``batch`` in evaluation mode, without gradients.

        Args:
            batch: the same one on all ranks of the pipeline.
            gather: return the outputs on all ranks. False: only on the rank of the last stage; None on the others.

        Collective: call on every rank.
        """
        found: list[Any] = []
        session, was_training = self._session, self.model.training
        self.eval()
        try:
            with torch.no_grad():
                session.engine.run_pipeline(
                    self.stages,
                    lambda: found.append(
                        self.stages.forward(batch, gather=gather, autocast=session.precision.autocast)
                    ),
                )
        finally:
            self.train(was_training)
        return found[0]


class _LossOfSchedule(torch.autograd.Function):
    """A loss whose backward pass runs the schedule, in which forward and backward passes alternate; it has its value afterwards."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, pipeline: Pipeline, batch: Any, is_empty: bool) -> torch.Tensor:
        ctx.pipeline, ctx.batch, ctx.is_empty = pipeline, batch, is_empty
        return value.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.pipeline.run_schedule(ctx.batch, scale, is_empty=ctx.is_empty)
        return None, None, None, None
