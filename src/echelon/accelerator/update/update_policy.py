"""One update: weights losses, runs backward passes, and finishes the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.epochs import Epochs
from echelon.accelerator.plugins.configuration import DataLoaderConfiguration
from echelon.accelerator.update.exact_update import ExactUpdate
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.spike_guard import build_spike_guard
from echelon.accelerator.update.step_timing import begin_backward
from echelon.accelerator.update.update_parts import UpdateParts
from echelon.base.errors import UsageError
from echelon.base.keywords import unexpected_keyword
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import user_line, warn
from echelon.data.exact.exact_batches import ExactOptions
from echelon.data.global_batch_slices import Contribution
from echelon.distributed.record.recorder import recorder_of_process
from echelon.status.notes import notes_of_process

_BACKWARD_OPTIONS = ("num_items", "gradient", "retain_graph", "create_graph", "inputs")


class UpdatePolicy:
    """Weights losses, runs backward passes, and finishes an update's gradients.

    Without a ``driver``, every process and micro-step has the same weight, unless losses are passed with ``num_items``, and the
    batch grows with the number of processes, as with Accelerate (``parity="off"``).

    Args:
        parts: the run's parts.
        driver: groups the loaders' batches into updates and weights their losses, in the exact modes.
    """

    epochs: Epochs
    """Set by the session."""

    def __init__(self, parts: UpdateParts, driver: ExactUpdate | None = None) -> None:
        self.config = parts.config
        self.world = parts.world
        self.data_world = parts.data_world
        self.loss_world = parts.loss_world
        self.engine = parts.engine
        self.scaler = parts.scaler
        self.state = parts.state
        self.objects = parts.objects
        self.unprepared = parts.unprepared
        self.driver = driver
        self.averages_gradients = driver is None or driver.split.averages_gradients
        """Whether the engine averages gradients across ranks; otherwise it sums them."""
        self.window = parts.build_window() if driver is None else driver.window
        self.spikes = build_spike_guard(parts, driver)
        """Watches the losses (``spike_guard``)."""
        self.step = 0
        """Number of micro-batches so far; like Accelerate's counter, it restarts at the end of a loader."""
        self.accumulating: tuple[nn.Module, ...] | None = None
        """Models passed to the active ``accumulate()``. (): all models. None: outside ``accumulate()``."""
        self._recorder = recorder_of_process()
        self._notes = notes_of_process()
        # Micro-steps of an incomplete window that this rank ends alone because it has no more batches.
        self._num_in_short_window = 0
        self._warned_of_micro_step_after_last = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "epochs": None, "_recorder": None, "_notes": None}  # the session builds the first

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._notes = notes_of_process()

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdatePolicy:
        """Return this object itself, so that copying a model that has its methods as hooks does not copy the run."""
        return self

    # ---- micro-steps -------------------------------------------------------------------------------------------------

    @property
    def uses_global_batches(self) -> bool:
        """Whether a DataLoader's batch size counts the samples of all processes together."""
        return self.driver is not None

    @property
    def drives(self) -> bool:
        """Whether a prepared loader decides where the update ends."""
        return self.driver is not None and self.driver.drives

    @property
    def is_unfinished(self) -> bool:
        """Whether this micro-step's gradients do not complete an update and must not be changed."""
        return self.driver is not None and not self.state.sync_gradients

    def count_micro_batch(self) -> bool:
        """Count a micro-batch; return whether its gradients are synchronized."""
        state = self.state
        plugin = state.plugin
        self.step += 1
        if self.drives:  # a prepared loader has already started the micro-step
            return state.sync_gradients or plugin.sync_each_batch
        num_steps = plugin.num_steps or 1
        is_last = self.step % num_steps == 0
        self._num_in_short_window = 0
        if plugin.sync_with_dataloader and self._ends_pass(is_whole=is_last):
            self.step = 0
            is_last = True
        state.sync_gradients = is_last
        state.micro_step, state.has_loss = self.window.begin_micro_step(), False
        return is_last or plugin.sync_each_batch

    def _ends_pass(self, *, is_whole: bool) -> bool:
        """Return whether the batch of this micro-step is the last one of its loader's pass, and therefore ends the window.

        Args:
            is_whole: whether the window ends in any case.

        Raises:
            UsageError: the last batch has ended a window already, and the loop trains more.
        """
        reading, num_steps = self.state.reading, self.state.num_steps
        loader = reading.trained
        if loader is None:
            return False
        batch = loader.fetched.take()
        if batch is None:  # not a training pass, or only one micro-step
            is_last, ends_early = loader.end_of_dataloader and reading.innermost is not None, loader.ends_early
        elif batch.num_uses == 1:
            # After batches that were split among micro-steps, this one is probably split, too.
            is_last, ends_early = batch.is_last and (is_whole or not loader.fetched.reuses), batch.ends_early
            batch.has_ended_window = is_last and not is_whole
        elif batch.has_ended_window:
            self._report_micro_step_after_last(is_being_read=reading.innermost is not None)
            return False
        else:
            return batch.is_last and is_whole
        if is_last and not is_whole and ends_early:
            self._num_in_short_window = self.step % num_steps
        return is_last

    def _report_micro_step_after_last(self, *, is_being_read: bool) -> None:
        if is_being_read or self.driver is not None:  # an exact mode promises the update of a plain loop
            raise UsageError(
                "accumulate() was entered again after the last batch of a loader, which had ended an accumulation window that was not "
                "complete: the batches are fetched ahead and replaced by copies, or split among several accumulate() blocks, so it is "
                "unknown which micro-step is the last",
                where=f"accumulate() at {user_line()}, gradient_accumulation_steps={self.state.num_steps}",
                do="fetch each batch right before its accumulate() block, or keep the batches until they are trained; or make the "
                "number of micro-steps in a pass a multiple of gradient_accumulation_steps and use "
                "GradientAccumulationPlugin(sync_with_dataloader=False)",
            )
        if not self._warned_of_micro_step_after_last:
            self._warned_of_micro_step_after_last = True
            warn(
                _(
                    "accumulate() was entered again after the last batch of a loader, which had ended an accumulation window that was not "
                    "complete; its gradients go into the next update. If the batches are fetched ahead and replaced by copies, keep "
                    "the batches until they are trained, or fetch each one right before its accumulate() block"
                )
            )

    # ---- backward ----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, num_items: float | None, kwargs: Mapping[str, Any]) -> None:
        """See ``Accelerator.backward``."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or (loss.dim() > 0 and loss.numel() != 1):
            loss = _checked_loss(loss, kwargs, num_devices=self.engine.capabilities.num_devices)
        if self.unprepared.is_pending:
            averaged = self.objects.stray_parameters() if self.engine.capabilities.replicates else []
            self.unprepared.run(self.objects.models, averaged=averaged)
        state, driver, inside = self.state, self.driver, self.accumulating is not None
        scale: float | None = None
        factor = 1.0
        contribution: Contribution | None = None
        if state.sync_gradients and self.data_world.world_size > 1:
            self.require_every_rank("backward()")
        if driver is not None:
            contribution = driver.take_loss(loss, num_items, is_accumulating=inside)
            if contribution is not None:
                inside = True
                if num_items is None:
                    scale = driver.weigh(contribution)
                elif contribution.is_padding:
                    num_items = 0.0
        if num_items is not None:
            trained = frozenset(map(id, self.trained_models()))
            scale, factor = self.window.weighted(num_items, inside=inside, sync=state.sync_gradients, trained=trained)
        elif scale is None:
            num_steps = state.plugin.num_steps or 1
            scale, factor = self.window.plain(num_steps=num_steps, inside=inside, sync=state.sync_gradients)
        if driver is not None:
            driver.before_backward()
        self._backpropagate(loss, scale, kwargs, num_items)
        if self.spikes is not None and not state.in_closure:
            if num_items is None and contribution is not None:
                num_items = contribution.num_items
            self.spikes.add_loss(loss, num_items)
        if driver is not None:
            driver.after_backward()
        if factor != 1.0:
            self._finish_gradients(factor)

    def _backpropagate(
        self, loss: torch.Tensor, scale: float, kwargs: Mapping[str, Any], num_items: float | None
    ) -> None:
        for name in kwargs:
            if name not in _BACKWARD_OPTIONS:
                raise unexpected_keyword("backward", name, _BACKWARD_OPTIONS)
        self.state.count_loss()
        notes = self._notes
        end = None if notes is None else begin_backward(loss, notes, communicates=self.world.world_size > 1)
        try:
            if scale == 0.0:
                self.engine.backward_zeros(loss, self.objects.parameters(), **kwargs)
            else:
                self.engine.backward(loss if scale == 1.0 else loss * scale, **kwargs)
        finally:
            if end is not None:
                end()
        if self._recorder is not None and scale != 0.0:  # after the pass, in which a pipeline computes its loss
            if not kwargs or (loss.numel() == 1 and not loss.is_complex()):  # gradient= also allows other losses
                self._recorder.add_loss(loss)
            if num_items is not None:
                self._recorder.add_items(num_items)

    def trained_models(self) -> list[nn.Module]:
        """Return the models passed to the active ``accumulate()``, or else all."""
        return list(self.accumulating or self.objects.models)

    def _finish_gradients(self, factor: float) -> None:
        # With sums over shards, each backward pass in the last micro-step computes the gradients of all models again.
        for model in self.trained_models() if self.averages_gradients else self.objects.models:
            self.engine.finish_gradients(model, factor)
        for parameter in self.objects.stray_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def update_loss(self) -> float:
        """Return the last update's loss: the mean over all items, processes and micro-steps.

        Several losses in one micro-step are added. For an update without items, the result is nan. This method waits
        for the device, so call it only to log the loss.

        Collective: call on every process.

        Raises:
            UsageError: the run is not in an exact mode, or no loss has been recorded yet.

        Examples:
            >>> accelerator = Accelerator(parity="exact")  # doctest: +SKIP
            >>> accelerator.log({"loss": accelerator.update_loss()}, step=10)  # doctest: +SKIP
        """
        if self.driver is None:
            raise UsageError(
                "update_loss() requires every loss's weight, which parity='off' does not record",
                where=f"parity={self.config.value.parity} (from {self.config.origins['parity']})",
                do="use Accelerator(parity='exact'), or accelerator.reduce(loss, 'mean')",
            )
        return self.driver.update_loss()

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def is_local(self) -> bool:
        """Whether gradients are still local to each rank: in the middle of a window, or in ``no_sync(unsynced=True)``."""
        return not self.state.sync_gradients or any(optimizer.unsynced for optimizer in self.objects.optimizers)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of ``optimizer`` (one, several, or all) in fp16 before they are read.

        In the exact modes, gradients are unscaled only in an update's last micro-step, because later gradients are
        scaled, too.

        Examples:
            >>> accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            >>> accelerator.unscale_gradients()
            >>> largest = max(parameter.grad.abs().max() for parameter in model.parameters())
        """
        if self.scaler is None or self.is_unfinished:
            return
        given = self.objects.optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            inner = one.optimizer if isinstance(one, AcceleratedOptimizer) else one
            self.engine.unscale(inner, unsynced=self.is_local())

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """See ``Accelerator.clip_grad_norm_``; the gradients are already unscaled."""
        for optimizer in self.objects.optimizers:
            optimizer.is_clipped = True
        norm = self.engine.clip_grad_norm(
            _as_iterable(parameters, "clip_grad_norm_"), max_norm, norm_type, unsynced=self.is_local()
        )
        if self._recorder is not None:
            self._recorder.set_norm(norm)
        if self.spikes is not None:
            self.spikes.set_norm(norm)
        return norm

    def unfinished_grad_norm(self, parameters: Any, norm_type: float) -> torch.Tensor:
        """Return the norm of the gradients accumulated so far on this rank."""
        norm = self.engine.clip_grad_norm(
            _as_iterable(parameters, "clip_grad_norm_"), math.inf, norm_type, unsynced=True
        )
        return norm if self.scaler is None else norm / self.scaler.get_scale()

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """See ``Accelerator.clip_grad_value_``; the gradients are already unscaled."""
        self.engine.clip_grad_value(_as_iterable(parameters, "clip_grad_value_"), clip_value, unsynced=self.is_local())

    # ---- ranks without further batches -------------------------------------------------------------------------------

    def require_every_rank(self, operation: str) -> None:
        """Raise if ``operation`` would wait for a rank that has run out of batches (outside ``join_uneven_inputs``)."""
        loaders = self.state.reading.loaders
        if not loaders:
            return
        for loader in reversed(loaders):  # any of several zipped loaders may have ended the loop of a rank
            loader.require_every_rank(operation)
        loader = loaders[-1]
        if self._num_in_short_window and self.accumulating is not None:
            num_steps = self.state.num_steps
            loader.refuse_short_window(operation, micro_step=self._num_in_short_window, num_steps=num_steps)

    def before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        """Forward pre-hook for models whose forward pass waits for every rank."""
        self.require_every_rank("the forward pass")

    def before_training_forward(self, model: nn.Module, _inputs: Any) -> None:
        """Forward pre-hook for models whose training forward pass waits for every rank (DDP broadcasts buffers)."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and model.training:
            self.require_every_rank("the forward pass")

    # ---- mode-dependent behavior -------------------------------------------------------------------------------------

    def check_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Check objects that are about to be prepared. Collective."""
        if self.driver is not None:
            self.driver.check_prepared(models, optimizers)

    def loader_options(self, config: DataLoaderConfiguration) -> ExactOptions | None:
        """Return how loaders split batches in the exact modes; None in plain mode. Collective on the first call."""
        return None if self.driver is None else self.driver.loader_options(config)

    def log_batch_size(self, batch_size: int | None) -> None:
        """Log once how this mode splits a loader's batch."""
        if self.driver is not None and batch_size is not None:
            self.driver.log_batch_size(batch_size)

    def snapshot(self) -> dict[str, Any] | None:
        """Update the progress; return the RNG states to resume with (None: the current ones)."""
        return None if self.driver is None else self.driver.snapshot()

    def drop_update(self) -> None:
        """Drop the update that is pending, with its gradients; the next micro-step starts a new one.

        Whatever waits for the end of an update is reset here and nowhere else: call this where a training ends, returns to a
        checkpoint or releases its objects. Otherwise the next update would contain micro-steps of an earlier one.
        """
        self.step = 0
        self._num_in_short_window = 0
        self.window.drop()
        self.state.drop_update()
        self.epochs.update_begin = None
        self.objects.drop_update()
        self.engine.drop_update()
        if self.driver is not None:
            self.driver.drop_update()
        if self.spikes is not None:
            self.spikes.forget_losses()

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint must store in addition to progress."""
        environment = None if self.driver is None else self.driver.split.environment
        return {} if environment is None else asdict(environment)

    def require_record(self, saved: Mapping[str, Any], folder: object) -> None:
        """Compare with what ``record`` returned when ``folder`` was saved, in any mode."""
        if self.driver is not None and self.driver.split.environment is not None and saved:
            self.driver.split.environment.require(saved, folder)


def _as_iterable(parameters: Any, operation: str) -> Iterable[torch.Tensor]:
    """Return the parameters passed to ``operation``: a tensor or several, as in torch.

    Raises:
        TypeError: a module was passed.
    """
    if isinstance(parameters, nn.Module):
        raise TypeError(
            _(
                "{operation}() expects parameters, but got a module ({name}). Pass model.parameters()",
                operation=operation,
                name=type(parameters).__name__,
            )
        )
    return [parameters] if isinstance(parameters, torch.Tensor) else parameters


def _checked_loss(loss: Any, kwargs: Mapping[str, Any], *, num_devices: int) -> torch.Tensor:
    """Return the loss to call backward on; a vector with one loss per device is averaged.

    Raises:
        UsageError: the loss is not a scalar tensor that requires grad.
    """
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            _("backward() expects a tensor, but got {name}", name=type(loss).__name__),
            do=_("pass the loss; if the model returns a dict or a tuple, use output.loss or output[0]"),
        )
    if loss.dim() == 1 and 1 < loss.numel() <= num_devices and "gradient" not in kwargs:
        loss = loss.mean()
    if loss.numel() != 1 and "gradient" not in kwargs:
        raise UsageError(
            _("backward() expects a scalar loss, but got a tensor of shape {shape}", shape=list(loss.shape)),
            do=_("reduce it, for example with loss.mean()"),
        )
    if not loss.requires_grad:
        raise UsageError(
            _("backward() got a loss that does not require grad"),
            do=_("compute it from the model's outputs, outside torch.no_grad(), and without .item() or .detach()"),
        )
    checked: torch.Tensor = loss
    return checked
