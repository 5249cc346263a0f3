"""``prepare_pippy``: inference with a model whose layers are divided among all ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from echelon.accelerator.state import PartialState
from echelon.base.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages  # slow to import


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Divide ``model`` into one stage for each rank, in place; its forward then runs the stages one after the other.

    Call the model with the same inputs on every rank. The last rank returns the outputs, without gradients and without padding;
    the others return None, or the outputs with ``gather_output``.

    Args:
        model: the whole model, with the same values on all ranks: a transformers decoder or an ``nn.Sequential``.
        split_points: ``auto`` balances the parameters. Otherwise the names of the modules with which the second and later stages begin.
        no_split_module_classes: has no effect, because stages never begin inside a layer of a decoder or a child of a Sequential.
        example_args: has no effect, because stages send each other the shapes.
        example_kwargs: as ``example_args``.
        num_chunks: into how many micro-batches a batch is cut. None: the number of ranks.
        gather_output: return the outputs on all ranks.

    Collective: call this function and the model on every rank.

    Raises:
        ConfigError: there is no rule for the model's stages, or ``split_points`` does not name beginnings of stages in their order.

    Examples:
        >>> model = prepare_pippy(model, split_points=["layers.6"], example_args=(x,))  # doctest: +SKIP
    """
    state: Any = PartialState()
    if state.num_processes == 1:
        return model.to(state.device)
    # Programs without pipelines do not import torch's, which is slow.
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages  # noqa: PLC0415
    from echelon.engines.pipeline_parallel.schedules import schedule_kind  # noqa: PLC0415
    from echelon.engines.pipeline_parallel.stages import cut_before, cut_model  # noqa: PLC0415

    number = state.num_processes if num_chunks is None else num_chunks
    if number < 1:
        raise ConfigError(f"num_chunks={number} is below 1", where="prepare_pippy()", do="set it to 1 or more")
    points = None if split_points in (None, "auto") else split_points
    if isinstance(points, str):
        points = [points]
    if points is None:
        cut = cut_model(model, state.num_processes)
    else:
        cut = cut_before(model, points, num_stages=state.num_processes)
    group = dist.group.WORLD
    assert group is not None
    stages = PipelineStages(
        model,
        cut,
        kind=schedule_kind("GPipe"),
        group=group,
        device=state.device,
        num_micro_batches=number,
        loss_fn=None if cut.kind == "decoder" else _no_loss,
    )
    model.to(state.device)
    model.hf_split_points = [names[0] for names in cut.stages[1:]]  # type: ignore[assignment]
    model.forward = _StagesForward(model.forward, stages, gathers=bool(gather_output))
    return model


def _no_loss(_outputs: Any, _batch: Any) -> NoReturn:
    raise UsageError("a model from prepare_pippy() is for inference", do="use accelerator.prepare_pipeline() to train")


class _StagesForward:
    """``model.forward`` of a model in stages."""

    def __init__(self, forward: Callable[..., Any], stages: PipelineStages, *, gathers: bool) -> None:
        functools.update_wrapper(self, forward, updated=())
        self._stages = stages
        self._gathers = gathers
        self._names = list(inspect.signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages = self._stages
        if not stages.is_decoder:
            inputs: Sequence[Any] = [*args, *kwargs.values()]
            return stages.forward({str(i): _placed(value) for i, value in enumerate(inputs)}, gather=self._gathers)
        batch = {name: _placed(v) for name, v in {**dict(zip(self._names, args)), **kwargs}.items() if v is not None}
        is_tuple = batch.pop("return_dict", None) is False
        batch.pop("use_cache", None)
        logits = stages.forward(batch, gather=self._gathers)
        if logits is None:
            return None
        return _as_outputs(stages, logits, batch, is_tuple=is_tuple)


def _placed(value: Any) -> Any:
    return value.to(PartialState().device) if isinstance(value, torch.Tensor) else value


def _as_outputs(stages: PipelineStages, logits: torch.Tensor, batch: Mapping[str, Any], *, is_tuple: bool) -> Any:
    loss = None if batch.get("labels") is None else stages.loss_fn(logits, batch)
    if is_tuple:
        return (logits,) if loss is None else (loss, logits)
    from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: PLC0415 - only for its models

    return CausalLMOutputWithPast(loss=loss, logits=logits)
