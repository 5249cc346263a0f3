"""One rank's part of a pipeline: its stages, and the passes of all micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from echelon.base.errors import ConfigError, UsageError
from echelon.engines.context_parallel.region import current_region
from echelon.engines.context_parallel.sequence_mask import SequenceMask
from echelon.engines.pipeline_parallel.boundaries import StageBoundaries
from echelon.engines.pipeline_parallel.forward import broadcast_tensors, forward_stages
from echelon.engines.pipeline_parallel.micro_batches import MicroBatches, Shape, num_tokens, split_batch
from echelon.engines.pipeline_parallel.schedules import ScheduleKind, build_schedule, run_schedule
from echelon.engines.pipeline_parallel.stages import (
    Absent,
    StageCut,
    check_decoder,
    copied_containers,
    remove_modules,
    stage_view,
    tied_names,
)
from echelon.engines.random_numbers import own_random_numbers
from echelon.engines.shards import local_tensors
from echelon.engines.state_dicts import plain_name, plain_state_dict

LossFunction = Callable[[Any, Any], torch.Tensor]
"""Takes the outputs of a micro-batch and its part of the batch; returns the mean loss over its items."""


@dataclass(eq=False)
class _Step:
    """What the loss of the current step needs."""

    batches: MicroBatches | None = None
    counts: list[float] = field(default_factory=list)
    scale: torch.Tensor | float = 1.0
    total: float = 1.0
    """The number of items of the batch."""
    is_empty: bool = False
    losses: list[torch.Tensor] = field(default_factory=list)


class _Stage(nn.Module):
    """Calls a stage with its keyword arguments, one micro-batch after the other.

    Torch would take tensors that are given to a schedule as inputs of the backward pass, which fails for a mask in schedules
    that compute the gradients of inputs alone (torch 2.13).
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self._waiting: list[tuple[dict[str, Any], SequenceMask | None]] = []

    def begin(self, arguments: Sequence[dict[str, Any]], masks: Sequence[SequenceMask | None]) -> None:
        """Take the arguments of a step's micro-batches, and the masks of the sequences that are cut over ranks.

        Every schedule of torch computes a stage's forward passes in their order.
        """
        self._waiting = [*reversed([*zip(arguments, masks, strict=True)])]

    def forward(self, *inputs: torch.Tensor) -> Any:
        arguments, mask = self._waiting.pop()
        region = None if mask is None else current_region()
        if region is not None and mask is not None:
            region.given_mask = region.mask = mask
        out = self.stage(*inputs, **arguments)
        return tuple(map(_not_a_view, out)) if isinstance(out, tuple) else _not_a_view(out)


def _not_a_view(out: torch.Tensor) -> torch.Tensor:
    """Return ``out``, copied if it is a view, which torch cannot detach in place after its backward pass (zero-bubble schedules)."""
    return out.clone() if out.requires_grad and out._is_view() else out


class PipelineStages:
    """The stages of one rank: ``model`` keeps only their modules, under their full names.

    Args:
        model: the whole model, equal on all ranks of the pipeline; changed in place.
        cut: the modules of each stage.
        kind: the schedule.
        group: the ranks of the pipeline.
        device: the device of this rank.
        num_micro_batches: into how many parts a batch is cut.
        loss_fn: see ``LossFunction``. None: the model's own ``loss_function`` (transformers).
        count_items: returns the number of items (samples or tokens) of a part of a batch. None: tokens with a label for a
            transformers decoder without ``loss_fn``, else samples.
        param_dtype: the dtype that mixed precision casts parameters to; None: their own.
        layer_plan: for modules of the whole model that are split over further ranks (tensor parallelism), their style.

    Raises:
        ConfigError: the model cannot be cut like this.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: StageCut,
        *,
        kind: ScheduleKind,
        group: dist.ProcessGroup,
        device: torch.device,
        num_micro_batches: int,
        loss_fn: LossFunction | None = None,
        count_items: Callable[[Any], float] | None = None,
        param_dtype: torch.dtype | None = None,
        layer_plan: Mapping[str, ParallelStyle] | None = None,
    ) -> None:
        self.model = model
        self.cut = cut
        self.group = group
        self.num_micro_batches = num_micro_batches
        self._kind = kind
        self._device = device
        self._ranks = kind.ranks(dist.get_world_size(group))
        assert len(self._ranks) == cut.num_stages, (self._ranks, cut)
        kind.check(dist.get_world_size(group), num_micro_batches)
        own = dist.get_rank(group)
        views = {number: stage_view(model, cut, number) for number in range(cut.num_stages)}
        if self.is_decoder:
            check_decoder(model, views)
        self._tied = self._copies(tied_names(model, cut))
        self.boundaries = StageBoundaries(list(views.values()), device=device, dtype=param_dtype)
        self.views = {number: view for number, view in views.items() if self._ranks[number] == own}
        """The modules that compute this rank's stages."""
        self._views = {number: _Stage(view) for number, view in views.items() if self._ranks[number] == own}
        self._containers = [pair for view in views.values() for pair in copied_containers(model, view)]
        modules = dict(model.named_modules())
        self.pieces: list[nn.Module] = [modules[name] for number in self._views for name in cut.stages[number]]
        """The modules of this rank's stages, each of which is called as a whole."""
        self.loss_fn = loss_fn or self._own_loss(model)
        """See ``LossFunction``."""
        counts_tokens = self.is_decoder and loss_fn is None
        self._count_items = count_items or (num_tokens if counts_tokens else None)
        kept = {id(parameter) for piece in self.pieces for parameter in piece.parameters()}
        self.names = [plain_name(name) for name, _ in model.named_parameters()]
        """The names of all parameters of the whole model, in its order."""
        self.state_names = list(plain_state_dict(model))
        """The names in the whole model's state dict, in its order."""
        self.aliases = _aliases(model)
        """Further names of tied parameters, each with the first one."""
        self._removed = WeakIdKeyDictionary({p: None for p in model.parameters() if id(p) not in kept})
        absent = [name for number, names in enumerate(cut.stages) if number not in self._views for name in names]
        remove_modules(model, absent)
        present = {name for name, module in model.named_modules() if not isinstance(module, Absent)}
        self.layer_plan = {name: style for name, style in (layer_plan or {}).items() if name in present}
        """The part of ``layer_plan`` for this rank's stages."""
        self._shape: Shape | None = None
        self._schedule: Any = None
        self._built: Any = None
        self._step = _Step()

    def _use_modes(self) -> None:
        """Set the training modes of the stages' copies of containers to those of the model."""
        for copied, original in self._containers:
            copied.training = original.training

    def units(self) -> list[nn.Module]:
        """Return the pieces that have parameters, which are sharded as units."""
        return [piece for piece in self.pieces if next(piece.parameters(), None) is not None]

    def drop_removed(self, optimizers: Iterable[Optimizer]) -> None:
        """Remove the parameters of other ranks' stages from ``optimizers`` that were created for the whole model."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [p for p in group["params"] if p not in self._removed]

    @property
    def is_decoder(self) -> bool:
        """Whether the model is a transformers decoder."""
        return self.cut.kind == "decoder"

    @property
    def last_rank(self) -> int:
        """The rank of the last stage in the group."""
        return self._ranks[-1]

    def _own_loss(self, model: nn.Module) -> LossFunction:
        if not self.is_decoder:
            raise ConfigError(
                f"a pipeline of {type(model).__name__} needs a loss function",
                where="prepare_pipeline(loss_fn=)",
                do="pass loss_fn=lambda outputs, batch: ... that returns the mean loss of a part of the batch",
            )
        decoder: Any = model
        compute, vocab_size = decoder.loss_function, decoder.config.vocab_size

        def loss_fn(logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
            shifted = batch.get("shift_labels")
            if shifted is None and current_region() is not None:
                raise UsageError(
                    f"{type(model).__name__} shifts labels inside this rank's piece of the sequence, so the labels at its ends would be wrong",
                    where="pipeline.step() inside context_parallel()",
                    do="before the block: batch['shift_labels'] = echelon.utils.shift_labels(batch['labels']), and add it to buffers=",
                )
            options = {} if shifted is None else {"shift_labels": shifted}
            loss: torch.Tensor = compute(logits=logits, labels=batch.get("labels"), vocab_size=vocab_size, **options)
            return loss

        return loss_fn

    # ---- tied weights ------------------------------------------------------------------------------------------------

    def _copies(self, tied: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int, bool]]:
        """Return this rank's copies: the name in its stage, the rank of the other copy, and whether this one comes second."""
        found, own = [], dist.get_rank(self.group)
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for first, stages in tied.items():
            ranks = [self._ranks[number] for number in stages]
            if len(set(ranks)) != 2 or len(ranks) != 2:
                raise ConfigError(
                    f"{first!r} is tied between the stages {', '.join(map(str, stages))} on rank(s) "
                    f"{', '.join(map(str, sorted(set(ranks))))} of the pipeline; supported are two stages on two ranks",
                    where="prepare_pipeline(schedule=)",
                    do="use a schedule whose first and last stage are on different ranks ('1F1B', 'Interleaved1F1B'), or untie the weights",
                )
            for number, other in (stages, stages[::-1]):
                if self._ranks[number] == own:
                    prefixes = tuple(f"{one}." for one in self.cut.stages[number])
                    here = next(n for n in names[id(self.model.get_parameter(first))] if n.startswith(prefixes))
                    found.append((here, self._ranks[other], number == stages[1]))
        return found

    def own_tensors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of the whole model's ``tensors`` by name that is for this rank's stages."""
        elsewhere = self.names_elsewhere()
        own = {name: value for name, value in tensors.items() if name not in elsewhere}
        missing = [name for name in self.second_names() if name not in own and self.aliases[name] in tensors]
        return own | {name: tensors[self.aliases[name]] for name in missing}

    def copied_names(self) -> dict[int, str]:
        """Return the first name of each weight in ``second_copies``, by the id of the copy."""
        return {id(self.model.get_parameter(name)): self.aliases[name] for name, _, second in self._tied if second}

    def names_elsewhere(self) -> set[str]:
        """Return the names of parameters and buffers that only other ranks have."""
        return {*self.names, *self.state_names} - {*plain_state_dict(self.model)}

    def add_tied_gradients(self) -> None:
        """Add to the gradient of each weight that the first and the last stage share that of its copy, so that both are equal.

        Collective: call on every rank with a copy, after gradients were reduced.
        """
        for name, other, _ in self._tied:
            parameter = self.model.get_parameter(name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            (own,) = local_tensors([parameter.grad])
            sent, received = own.contiguous(), torch.empty_like(own)
            works = [
                dist.isend(sent, group=self.group, group_dst=other),
                dist.irecv(received, group=self.group, group_src=other),
            ]
            for work in works:
                assert work is not None
                work.wait()
            own.add_(received)

    def second_copies(self) -> list[nn.Parameter]:
        """Return this rank's copies of weights that count on another rank: for norms and checkpoints."""
        return [self.model.get_parameter(name) for name, _, is_second in self._tied if is_second]

    def second_names(self) -> list[str]:
        """Return the names of ``second_copies``."""
        return [name for name, _, is_second in self._tied if is_second]

    # ---- training ----------------------------------------------------------------------------------------------------

    def count_items(self, batch: Any) -> float:
        """Return the number of items of ``batch``, over which the loss of ``run`` is a mean."""
        return sum(self._counts(self._split(batch)))

    def _split(self, batch: Any) -> MicroBatches:
        region = current_region()
        # The positions of a piece of a sequence are given: it is not padded, only rows are.
        at_least = self._shape if region is None or self._shape is None else Shape(self._shape.rows)
        with torch._C.DisableTorchFunction():  # the numbers of rows are not positions
            return split_batch(batch, self.num_micro_batches, is_decoder=self.is_decoder, at_least=at_least)

    def _counts(self, split: MicroBatches) -> list[float]:
        if self._count_items is None:
            return [float(rows) for rows in split.num_rows]
        return [float(self._count_items(batch)) if rows else 0.0 for batch, rows in zip(split.batches, split.num_rows)]

    def run(
        self,
        batch: Any,
        *,
        scale: torch.Tensor | float = 1.0,
        is_empty: bool = False,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> float:
        """Run the forward and backward passes of all micro-batches; return the mean loss over the batch's items.

        Args:
            batch: the same one on all ranks of the pipeline.
            scale: factor of the mean loss in the backward passes.
            is_empty: whether the samples are padding, so that all gradients are zeros.
            autocast: returns the context of the forward passes.

        Collective: call on every rank of the pipeline.
        """
        split = self._split(batch)
        self._shape = split.shape
        schedule = self._plan(split, autocast)
        counts = self._counts(split)
        self._step = _Step(batches=split, counts=counts, scale=scale, total=sum(counts), is_empty=is_empty)
        with torch._C.DisableTorchFunction():
            targets = torch.arange(self.num_micro_batches).repeat_interleave(split.shape.rows)
        self._begin(split)
        own = dist.get_rank(self.group)
        try:
            with torch.enable_grad(), autocast(), own_random_numbers(own, self._device) as numbers:
                run_schedule(schedule, split.inputs if 0 in self._views else (), targets)
            mine = sum(
                (loss.double() for loss in self._step.losses), torch.zeros((), dtype=torch.float64, device=self._device)
            )
        finally:
            self._step = _Step()
        if self._device.type == "mps":  # without float64
            mine = mine.float()
        # Only the last stage's rank has losses. A sum, and no broadcast, because the other number is of all ranks.
        both = torch.stack([mine, torch.full_like(mine, float(numbers.has_drawn))])
        dist.all_reduce(both, group=self.group)
        loss, num_drawn = both.tolist()
        if num_drawn:
            numbers.advance()
        return float(loss)

    def _begin(self, split: MicroBatches) -> None:
        """Give the stages what they need for the micro-batches of ``split``."""
        region, rows = current_region(), split.shape.rows
        mask = None if region is None else region.given_mask
        for view in self._views.values():
            view.begin(
                _arguments(split),
                [
                    None if mask is None else mask.rows(split.index[n * rows : (n + 1) * rows])
                    for n in range(self.num_micro_batches)
                ],
            )
        self._use_modes()

    def _plan(self, split: MicroBatches, autocast: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Return the schedule for micro-batches of this shape, with buffers for them."""
        rows = split.shape.rows
        arguments = _arguments(split)[0]
        built = (split.shape, tuple(one.shape[1:] for one in split.inputs), tuple(sorted(arguments)))
        if built != self._built:
            boundaries = self.boundaries.find(tuple(one[:rows] for one in split.inputs), arguments, autocast())
            self._schedule = build_schedule(
                self._kind,
                self._views,
                boundaries,
                group=self.group,
                device=self._device,
                num_micro_batches=self.num_micro_batches,
                loss_fn=self._loss,
            )
            self._built = built
        return self._schedule

    def _loss(self, outputs: Any, target: torch.Tensor) -> torch.Tensor:
        step, number = self._step, int(target[0])
        assert step.batches is not None
        num_items = step.counts[number]
        if not num_items or step.is_empty:
            # The mean of no items is NaN, and NaN * 0, too; the passes of the other ranks wait for these.
            first = outputs[0] if isinstance(outputs, tuple) else outputs
            nothing: torch.Tensor = first.sum() * 0.0
            return nothing
        own = self._unpadded(outputs, step.batches, number)
        loss = self.loss_fn(own, step.batches.batches[number])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(
                "loss_fn must return a scalar tensor",
                where="prepare_pipeline(loss_fn=)",
                do="return a mean over the items",
            )
        share = loss * (num_items / step.total)
        step.losses.append(share.detach())
        return share * step.scale

    def _unpadded(self, outputs: Any, split: MicroBatches, number: int) -> Any:
        if isinstance(outputs, tuple):
            return tuple(self._unpadded(one, split, number) for one in outputs)
        own = outputs[: split.num_rows[number]]
        return own[:, : split.num_tokens] if self.is_decoder else own

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def forward(
        self, batch: Any, *, gather: bool = True, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Any:
        """Return the model's outputs for ``batch``, without gradients: on all ranks of the pipeline, or with ``gather=False`` on
        that of the last stage (None on others).

        Collective: call on every rank of the pipeline.
        """
        split = split_batch(batch, self.num_micro_batches, is_decoder=self.is_decoder, at_least=None)
        rows = split.shape.rows
        parts = [tuple(one[n * rows : (n + 1) * rows] for one in split.inputs) for n in range(self.num_micro_batches)]
        self._begin(split)
        with torch.no_grad(), autocast():
            outputs = forward_stages(self._views, parts, ranks=self._ranks, group=self.group, device=self._device)
        found: list[torch.Tensor] = []
        if outputs:
            own = [self._unpadded(out, split, number) for number, out in enumerate(outputs)]
            found = [torch.cat(parts) for parts in zip(*own)]
        if gather:
            found = broadcast_tensors(found, source=self.last_rank, group=self.group, device=self._device)
        return None if not found else found[0] if len(found) == 1 else tuple(found)


def _aliases(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), plain_name(name)) != plain_name(name):
            found[plain_name(name)] = first[id(parameter)]
    return found


def _arguments(split: MicroBatches) -> list[dict[str, Any]]:
    """Return the stages' keyword arguments for each micro-batch."""
    rows = split.shape.rows
    return [
        {n: v[start : start + rows] if isinstance(v, torch.Tensor) else v for n, v in split.arguments.items()}
        for start in range(0, rows * len(split.batches), rows)
    ]
