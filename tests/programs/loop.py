"""A drawn program as a script on echelon's Accelerator (level 2): the loop that a user would write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from echelon.utils import DeepSpeedPlugin, GatheredParameters, GradScalerKwargs, find_executable_batch_size
from tests.prepared_loop import whole
from tests.programs.parts import (
    Batch,
    Rows,
    fields_of,
    losses_of,
    make_evaluation_loader,
    make_loader,
    make_model,
    make_optimizers,
    make_schedule,
    prediction_of,
)
from tests.programs.plain import ORDER_SEED, ZIPPED_SEED, zipped_losses, zipped_program
from tests.programs.program import Layout, Program

FP16_SCALE = 1024.0  # gradients of about one stay below the largest number of fp16, where fully_shard computes in it


@dataclass
class Found:
    """What a rank has seen; lists have an entry for each update unless they say otherwise."""

    weights: list[torch.Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    epochs: list[list[int]] = field(default_factory=list)
    """The samples that ``gather_for_metrics`` gave in each epoch."""
    evaluations: list[torch.Tensor] = field(default_factory=list)
    evaluated: list[list[int]] = field(default_factory=list)
    evaluation_losses: list[float] = field(default_factory=list)
    num_steps: int = 0
    has_saved: bool = False
    """This start ended at a save: the rest is another's."""


def _accelerator(program: Program, layout: Layout, folder: Path | None) -> Accelerator:
    engine, options = layout.engine, dict[str, Any]()
    if engine is not None and engine.startswith("fsdp2"):
        engine = "fsdp2"
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=layout.engine == "fsdp2 stage 3"
        )
    if engine is not None and engine.startswith("deepspeed"):
        # Small parameters are sharded, too; batches have no size where a loader is prepared after its model.
        zero = {"stage": int(engine.split()[-1]), "stage3_param_persistence_threshold": 0}
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
        engine, options["deepspeed_plugin"] = "deepspeed", DeepSpeedPlugin(hf_ds_config=config)
    if program.fp16:
        options["kwargs_handlers"] = [GradScalerKwargs(init_scale=FP16_SCALE)]
    return Accelerator(
        gradient_accumulation_steps=1 if program.no_sync else program.accumulation,
        parity=layout.parity,
        engine=engine,
        mixed_precision="fp16" if program.fp16 else "no",
        max_micro_batch_size=layout.max_micro,
        canonical_shards=layout.shards,
        dataloader_config=DataLoaderConfiguration(
            even_batches=program.even_batches,
            split_batches=program.split_batches,
            dispatch_batches=program.dispatches,
            use_seedable_sampler=program.seedable,
            data_seed=program.seed + ORDER_SEED if layout.parity != "off" else None,
            replay_iterable=program.replays,
        ),
        **options,
    )


def train(program: Program, layout: Layout, folder: Path | None, *, goes_on: bool = False) -> Found:
    """Run the program on this rank. ``goes_on``: from what was saved in ``folder``."""
    return _Script(program, layout, folder, goes_on=goes_on).run()


class _Script:
    def __init__(self, program: Program, layout: Layout, folder: Path | None, *, goes_on: bool) -> None:
        self.program, self.layout, self.folder = program, layout, folder
        self.found = Found()
        self.accelerator = accelerator = _accelerator(program, layout, folder)
        self.num_windows = 0  # in which an update was made or left out
        self.place = 0  # micro-steps of the current window
        self.has_returned = False
        _train_before(accelerator, program)
        self.num_steps_before = accelerator.progress.step
        torch.manual_seed(program.seed)
        rows = Rows(program)
        model: Any = make_model(replace(program, seed=program.seed + 1000) if goes_on else program)
        optimizers: list[Any] = [] if program.made == "after" else make_optimizers(program, model)
        world = (dist.get_rank(), layout.world_size) if dist.is_initialized() else (0, 1)
        loader: Any = make_loader(program, rows, world=world)
        evaluation_rows = Rows(program, num_samples=5 + program.seed % 7, seed=900)
        evaluation_loader: Any = make_evaluation_loader(program, evaluation_rows)
        if program.made == "before" and program.is_prepared:
            schedules = self._schedules(optimizers)
            model, *prepared = accelerator.prepare(model, *optimizers, *schedules)
            self.optimizers, self.schedules = prepared[: len(optimizers)], prepared[len(optimizers) :]
        elif program.made == "first" and program.is_prepared:
            schedules = self._schedules(optimizers)
            self.optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
            model = accelerator.prepare(model)
            self.schedules = [accelerator.prepare(schedule) for schedule in schedules]
        else:
            model = accelerator.prepare(model)
            optimizers = optimizers or make_optimizers(program, model)
            schedules = self._schedules(optimizers)
            if program.is_prepared:
                self.optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
                self.schedules = [accelerator.prepare(schedule) for schedule in schedules]
            else:
                self.optimizers, self.schedules = optimizers, schedules
        self.model = model
        self.loader = accelerator.prepare(loader)
        self.evaluation_loader = accelerator.prepare(evaluation_loader) if program.evaluates != "no" else None
        self.zipped_loader: Any = None
        if program.zipped:
            self.zipped_loader = accelerator.prepare(
                make_loader(zipped_program(program), Rows(program, seed=ZIPPED_SEED), batch_size=program.zipped)
            )
        if goes_on:
            accelerator.resume(folder)

    def _schedules(self, optimizers: list[Any]) -> list[Any]:
        schedules = [make_schedule(self.program, optimizer) for optimizer in optimizers]
        return [schedule for schedule in schedules if schedule is not None]

    def run(self) -> Found:
        program, accelerator, found = self.program, self.accelerator, self.found
        epochs: Iterable[int] = range(program.epochs) if program.saves is None else accelerator.epochs(program.epochs)
        for epoch in epochs:
            if program.unfreezes is not None and epoch >= program.unfreezes:
                for parameter in self.model.parameters():
                    parameter.requires_grad_(True)
            self.model.train()
            self.loader.set_epoch(epoch)
            found.epochs.append([])
            self._epoch()
            if found.has_saved:
                break
            if program.evaluates == "epoch":
                self._evaluate()
        found.num_steps = accelerator.progress.step - self.num_steps_before
        inner = accelerator.unwrap_model(self.model)
        with (
            GatheredParameters(list(inner.parameters())) if "deepspeed" in (self.layout.engine or "") else nullcontext()
        ):
            found.weights = [whole(parameter) for parameter in inner.parameters()]
        return found

    def _epoch(self) -> None:
        program, accelerator = self.program, self.accelerator
        is_off = self.layout.parity == "off"
        passes = zip(self.loader, self.zipped_loader) if program.zipped else ((batch, None) for batch in self.loader)
        updates = 0
        num_skips = 0  # of batches
        if program.splits == "counted":
            passes = ((piece, None) for batch, _ in passes for piece in parts_of(fields_of(batch)))
        for number, (batch, other) in enumerate(_fetched_ahead(passes, program.fetches)):
            if program.skips:
                is_skipped = (number if is_off else num_skips) % 3 == 1
                num_skips += accelerator.sync_gradients
                if is_skipped:
                    continue
            if program.no_sync:
                if not self._window_by_hand(number, fields_of(batch)):
                    continue
            else:
                returns = False
                with accelerator.accumulate(self.model) if program.accumulates else nullcontext():
                    returns = self._returns_now()
                    self._micro_step(fields_of(batch), None if other is None else fields_of(other), returns=returns)
                self.place += 1
                if program.breaks_within and updates == program.breaks:
                    return
                if returns or not accelerator.sync_gradients:
                    self.place = 0 if returns else self.place
                    continue
            self.place = 0
            self.num_windows += 1
            updates += 1
            if program.returns != "no" and self.num_windows == 1:
                accelerator.save_state(self.folder)
            if program.returns == "update" and self.num_windows == program.returns_after:
                accelerator.load_state(self.folder)
            if program.evaluates == "middle" and updates == 1:
                self._evaluate()
            if program.saves is not None and accelerator.progress.step == program.saves:
                accelerator.save_state(self.folder)
                self.found.has_saved = True
                return
            if updates == program.breaks and not program.breaks_within:
                return

    def _window_by_hand(self, number: int, batch: Any) -> bool:
        """Make a micro-step of a window that the script counts; return whether it was the last, with the step."""
        program, accelerator = self.program, self.accelerator
        place = number % program.accumulation
        window = min(program.accumulation, len(self.loader) - (number - place))
        is_last = place + 1 == window
        with nullcontext() if is_last else accelerator.no_sync(self.model):
            for loss, _ in losses_of(program, self.model, batch):
                accelerator.backward(loss / window)
        self.found.epochs[-1] += accelerator.gather_for_metrics(batch.index).tolist()
        if not is_last:
            return False
        if program.clipping != "none":
            self._clip()
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        self.found.rates.append(float(self.optimizers[0].param_groups[-1]["lr"]))
        self._clear()
        return True

    def _returns_now(self) -> bool:
        """Tell whether this micro-step goes back to the checkpoint, instead of a step."""
        program = self.program
        is_near = program.returns in ("window", "nan") and self.num_windows == program.returns_after
        if not is_near or self.has_returned:
            return False
        # In the exact modes, an update of which a part is dropped cannot be continued.
        is_off = self.layout.parity == "off"
        self.has_returned = (
            self.place == program.seed % program.accumulation if is_off else self.accelerator.sync_gradients
        )
        return self.has_returned

    def _micro_step(self, batch: Any, other: Any, *, returns: bool) -> None:
        program, accelerator, found = self.program, self.accelerator, self.found
        if program.clears_first:
            self._clear()
        if program.closure:
            for optimizer in self.optimizers:
                optimizer.step(lambda: self._backward(batch, other, clears=True))
        else:
            total = self._backward(
                batch, other, clears=False, factor=math.nan if returns and program.returns == "nan" else 1.0
            )
            if returns:
                if program.reads:
                    accelerator.clip_grad_norm_(self.model.parameters(), 1e9)
                self._note_samples(batch)
                accelerator.load_state(self.folder)
                return
            if self.layout.parity == "off":
                found.losses.append(float(accelerator.reduce(total.nan_to_num(), "mean")))
            elif accelerator.sync_gradients and not program.zipped:
                found.losses.append(
                    accelerator.update_loss()
                    if accelerator.session.update.window.total or program.loss != "items"
                    else 0.0
                )
        if program.reads:
            for _ in range(2):
                accelerator.clip_grad_norm_(self.model.parameters(), 1e9)
        self._note_samples(batch)
        if program.guards and not accelerator.sync_gradients:
            return
        if program.clipping != "none":
            self._clip()
        if program.leaves_out and self.num_windows % 3 == 1 and accelerator.sync_gradients:
            self._clear()
            return
        if not program.closure:
            for optimizer in self.optimizers:
                optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        if accelerator.sync_gradients:
            found.rates.append(float(self.optimizers[0].param_groups[-1]["lr"]))
        if not program.clears_first:
            self._clear()

    def _note_samples(self, batch: Any) -> None:
        program = self.program
        if program.fetches == 1 and program.splits != "counted":  # else the loader's position is not that of the batch
            self.found.epochs[-1] += self.accelerator.gather_for_metrics(batch.index).tolist()

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.program.set_to_none)

    def _backward(self, batch: Any, other: Any, *, clears: bool, factor: float = 1.0) -> torch.Tensor:
        program, accelerator = self.program, self.accelerator
        if clears:
            self._clear()
        total: Any = 0.0
        pieces = parts_of(batch) if program.splits == "divided" else [batch]
        losses = [_shares(program, self.model, piece, len(piece.index) / len(batch.index)) for piece in pieces]
        if other is not None:
            losses.append(zipped_losses(program, self.model, other))
        for several in losses:
            for loss, num_items in several:
                if program.peeks:
                    with torch.no_grad():
                        self.model(batch.x, batch.token)
                loss = loss * factor if factor != 1.0 else loss
                accelerator.backward(loss, num_items=num_items)
                total = total + loss.detach()
        assert isinstance(total, torch.Tensor)
        return total

    def _clip(self) -> None:
        program, accelerator = self.program, self.accelerator
        if self.layout.parity == "off" and not accelerator.sync_gradients:
            return  # as Accelerate's documents have it; in the exact modes echelon itself waits for the end of the update
        if program.clipping == "value":
            accelerator.clip_grad_value_(self.model.parameters(), 0.02)
            return
        if not accelerator.sync_gradients:
            return
        kind = float("inf") if program.clipping == "inf" else 2.0
        self.found.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), 0.05, kind)))

    def _evaluate(self) -> None:
        self.model.eval()
        indices, predictions = [], []
        with torch.no_grad():
            for batch in self.evaluation_loader:
                batch = fields_of(batch)
                out = prediction_of(self.model(batch.x, batch.token))
                index, prediction = self.accelerator.gather_for_metrics((batch.index, out[:, 0]))
                indices.append(index)
                predictions.append(prediction)
        self.model.train()
        self.found.evaluated.append(torch.cat(indices).tolist())
        self.found.evaluations.append(torch.cat(predictions))


def _fetched_ahead(passes: Iterable[Any], num: int) -> Iterator[Any]:
    """Yield the batches of ``passes``; ``num`` of them are fetched before the first one is trained."""
    batches = iter(passes)
    while window := list(islice(batches, num)):
        yield from window


def _shares(program: Program, model: Any, batch: Any, share: float) -> Iterator[tuple[torch.Tensor, float | None]]:
    """Yield the losses of a part of a batch, times its share of the batch."""
    for loss, num_items in losses_of(program, model, batch):
        yield loss if share == 1.0 else loss * share, num_items


def parts_of(batch: Any) -> list[Batch]:
    """Split a batch in two; a single sample stays one."""
    chunks = (column.chunk(2) for column in batch)
    return [Batch(*columns) for columns in zip(*chunks)]


def _train_before(accelerator: Accelerator, program: Program) -> None:
    """Begin another training with the same Accelerator, and end it in a window."""
    if program.retries == "memory":
        try:
            _begin_training(accelerator, program, raises=MemoryError())
        except MemoryError:
            accelerator.free_memory()
    elif program.retries == "batch_size":
        too_large = program.batch_size + 1

        @find_executable_batch_size(starting_batch_size=too_large, reduce_batch_size_fn=lambda: program.batch_size)
        def attempt(batch_size: int) -> None:
            accelerator.free_memory()
            if batch_size == too_large:
                _begin_training(accelerator, program, raises=torch.OutOfMemoryError("CUDA out of memory."))

        attempt()
    elif program.retries != "no":
        _begin_training(accelerator, program)
        if program.retries == "second":
            accelerator.free_memory()


def _begin_training(accelerator: Accelerator, program: Program, *, raises: Exception | None = None) -> None:
    """Train a few micro-steps; the last one is not stepped, or fails."""
    rows = Rows(program, num_samples=13)
    model: Any = make_model(program)
    size = accelerator.num_processes if program.split_batches else 1
    plain: dict[str, Any] = {"data": "map", "order": "sequential", "drop_last": False, "already_sharded": False}
    loader: Any = make_loader(replace(program, batch_size=size, **plain), rows)
    model, *optimizers, loader = accelerator.prepare(model, *make_optimizers(program, model), loader)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            for loss, num_items in losses_of(program, model, fields_of(batch)):
                accelerator.backward(loss, num_items=num_items)
            if number == 1:
                if raises is not None:
                    raise raises
                return
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
