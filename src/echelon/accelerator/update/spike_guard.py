"""Watches the loss of each update, and decides whether the update is applied (``spike_guard``).

A loss is a spike if it exceeds the median of the last 64 losses by ``spike_factor`` standard deviations, once there are 16 of them. The
standard deviation is estimated as 1.4826 times the median absolute deviation, and as at least one percent of the median. A loss that
is NaN or infinite is always a spike, as is a norm of the gradients that is not finite. All ranks decide by the same number: the mean
loss over all ranks.

Source: Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", 1993 (the factor 1.4826).
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from echelon.accelerator.update.exact_update import ExactUpdate
from echelon.accelerator.update.kept_state import copy_buffers, restore_buffers
from echelon.accelerator.update.update_parts import UpdateParts, sums_over_ranks
from echelon.base.errors import ConfigError, LossSpikeError, UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.config.origin import SettingSource
from echelon.data.loader import PreparedLoader
from echelon.distributed.record.recorder import recorder_of_process

_WINDOW = 64
_WARM_UP = 16
_LEAST_SPREAD = 0.01  # of the median: a loss that hardly varies would otherwise have spikes of any size
_MAX_IN_ROW = 10  # skipped updates
_MAX_UNJUDGED = 1000  # losses
_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSamples:
    """The samples of one update, of all ranks."""

    epoch: int
    first: int
    last: int
    unit: str
    """``sample``: positions in the order of the epoch (exact modes). ``batch``: numbers of each rank's batches in the epoch."""
    indices: tuple[int, ...] | None = None
    """Their indices in the dataset; None if they are unknown."""

    def __str__(self) -> str:
        if self.unit == "batch":
            text = _(
                "batches {first} to {last} of each process in epoch {epoch}",
                first=self.first,
                last=self.last,
                epoch=self.epoch,
            )
        else:
            text = _("samples {first} to {last} of epoch {epoch}", first=self.first, last=self.last, epoch=self.epoch)
        if self.indices is None:
            return text
        shown = ", ".join(map(str, self.indices[:8])) + (", ..." if self.indices[8:] else "")
        return _("{samples} (dataset[{indices}])", samples=text, indices=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePosition:
    """Where an update's samples are in the data."""

    epoch: int
    numbers: range
    """Positions in the order of the epoch or, without ``loader``, numbers of each rank's batches."""
    loader: PreparedLoader | None = None
    """The loader of the samples, in the exact modes."""

    def samples(self) -> UpdateSamples:
        """Return the samples, with their indices in the dataset if the order can be computed."""
        first, last, loader = self.numbers.start, self.numbers.stop - 1, self.loader
        if loader is None:
            return UpdateSamples(epoch=self.epoch, first=first, last=last, unit="batch")
        indices = loader.source.dataset_indices(self.epoch, self.numbers)
        return UpdateSamples(epoch=self.epoch, first=first, last=last, unit="sample", indices=indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """An update whose loss is a spike."""

    step: int
    loss: float
    median: float
    """Of the losses before; nan if there are none."""
    samples: UpdateSamples | None

    def __str__(self) -> str:
        if math.isnan(self.median):
            return _(
                "step {step}: the loss {loss:.6g} is a spike (there are no losses to compare it with)",
                step=self.step,
                loss=self.loss,
            )
        return _(
            "step {step}: the loss {loss:.6g} is a spike (median of the last losses: {median:.6g})",
            step=self.step,
            loss=self.loss,
            median=self.median,
        )


class SpikeGuard:
    """Judges the loss of each update.

    Args:
        parts: the run's parts; their settings contain ``spike_guard``.
        driver: groups batches into updates, in the exact modes.

    Raises:
        ConfigError: the factor is not positive, or the guard cannot work with another setting.
    """

    def __init__(self, parts: UpdateParts, driver: ExactUpdate | None) -> None:
        config = parts.config.value
        assert config.spike_guard is not None
        self.mode = config.spike_guard
        self.is_driven = False
        """Whether the Trainer judges the updates and drops them, because its loop can compute a batch again."""
        self.skipped: list[dict[str, Any]] = []
        """The updates of this run that were dropped, in order; a checkpoint stores them."""
        self._parts = parts
        self._driver = driver
        self._factor = config.spike_factor
        self._window: deque[float] = deque(maxlen=_WINDOW + 1)  # one more, because ``take_back`` removes one
        self._losses: list[tuple[torch.Tensor, float]] = []  # of this update on this rank, with their numbers of items
        self._norm: torch.Tensor | None = None
        self._known: float | None = None  # the loss of this update, if the caller has reduced it
        self._num_judged = -1  # losses when the last update was judged
        self._spike: Spike | None = None  # in the update that was judged last
        self._num_in_row = 0
        self._leader: Any = None  # refers to the optimizer whose step judges
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # as they were before this update
        self._require_possible()

    def _require_possible(self) -> None:
        config, origins = self._parts.config.value, self._parts.config.origins
        if not self._factor > 0:
            raise ConfigError(
                _("spike_factor={factor} must be positive", factor=self._factor),
                where=str(origins["spike_factor"]),
                do=_("set a number such as 10"),
            )
        if self.mode == "warn":
            return
        if not self._parts.engine.capabilities.exposes_state:
            raise ConfigError(
                _(
                    "spike_guard={mode!r} does not work with the {name} engine, which steps its own copies of the weights",
                    mode=self.mode,
                    name=self._parts.engine.capabilities.name,
                ),
                where=str(origins["spike_guard"]),
                do=_("use spike_guard='warn', or engine='ddp', 'zero1' or 'fsdp2'"),
            )
        if config.verify_every is not None:
            raise ConfigError(
                _(
                    "spike_guard={mode!r} drops updates, but verify_every={every} expects a step after every update",
                    mode=self.mode,
                    every=config.verify_every,
                ),
                where=f"{origins['spike_guard']}, {origins['verify_every']}",
                do=_("remove one of them, or use spike_guard='warn'"),
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_leader": None, "_buffers": []}

    def begin(self) -> None:
        """Check that updates can be dropped, and keep the buffers, when an optimizer is prepared.

        Raises:
            UsageError: the loop is the user's, and ``spike_guard`` is ``rollback``.
        """
        if self.mode == "rollback" and not self.is_driven:
            raise UsageError(
                _(
                    "spike_guard='rollback' needs a loop that can compute a batch again with earlier weights, which echelon cannot do "
                    "in a loop of your own"
                ),
                where=str(self._parts.config.origins["spike_guard"]),
                do=_("use spike_guard='skip', which drops an update before its step, or train with echelon.Trainer"),
            )
        if self.mode == "skip" and not self.is_driven:
            self._buffers = copy_buffers(self._parts.objects)

    # ---- what an update reports --------------------------------------------------------------------------------------

    def add_loss(self, loss: torch.Tensor, num_items: float | None) -> None:
        """Add the loss of a backward pass. It is read when the update is judged."""
        if num_items == 0 or loss.numel() != 1:
            return
        self._losses.append((loss.detach(), 1.0 if num_items is None else float(num_items)))
        if len(self._losses) > _MAX_UNJUDGED * self._parts.state.num_steps:
            raise UsageError(
                _("spike_guard has seen many losses, but no step of a prepared optimizer, so it guards nothing"),
                where=f"spike_guard={self.mode!r} ({self._parts.config.origins['spike_guard']})",
                do=_("call optimizer = accelerator.prepare(optimizer), or remove spike_guard"),
            )

    def set_norm(self, norm: torch.Tensor) -> None:
        """Set the norm of this update's gradients. With loss scaling, the scaler itself skips updates whose norm is not finite."""
        if self._parts.scaler is None:
            self._norm = norm

    def set_loss(self, loss: float) -> None:
        """Set the loss of this update, if it is known already; the same on all ranks."""
        self._known = loss

    def forget_losses(self) -> None:
        """Forget what the update in progress has reported."""
        self._losses, self._norm, self._known = [], None, None

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def allows_step(self, optimizer: Optimizer, *, unsynced: bool) -> bool:
        """Return whether ``optimizer`` may step; warn, and restore the models' buffers, if it may not.

        Collective: call on every rank.

        Raises:
            UsageError: the loss of the update is not known.
            LossSpikeError: too many updates in a row were dropped.
        """
        if unsynced:
            raise UsageError(
                _("spike_guard compares losses over all ranks, but a step used the gradients of one rank only"),
                where=f"LocalSGD, or no_sync(unsynced=True), with spike_guard={self.mode!r}",
                do=_("remove spike_guard"),
            )
        if self._parts.state.num_losses != self._num_judged:
            self._require_leader(optimizer)
            spike = self.judge()
            if spike is not None and self.mode == "skip":
                restore_buffers(self._buffers)
                self.record_skipped(spike)
            elif self.mode == "skip":
                self._buffers = copy_buffers(self._parts.objects)
        return self._spike is None or self.mode == "warn"

    def _require_leader(self, optimizer: Optimizer) -> None:
        """Raise if the losses of several optimizers alternate, because each of them has its own level."""
        leader = None if self._leader is None else self._leader()
        if leader is None:
            self._leader = weakref.ref(optimizer)
        elif leader is not optimizer:
            raise UsageError(
                _(
                    "spike_guard compares each loss with those before, but several optimizers step after losses of their own"
                ),
                where=f"optimizer.step(), spike_guard={self.mode!r}",
                do=_("call all optimizers' step() after all losses of the batch, or remove spike_guard"),
            )

    def judge(self, *, step: int | None = None, position: UpdatePosition | None = None) -> Spike | None:
        """Judge the update whose last backward pass has run; return its spike, or None.

        An update without losses is none. In the mode ``warn``, this warns of the spike.

        Args:
            step: number of the update's step. None: one more than the optimizers have taken.
            position: where its samples are. None: where the loader is.

        Collective: call on every rank.
        """
        self._num_judged = self._parts.state.num_losses
        loss, is_finite = self._loss_of_update()
        self.forget_losses()
        self._spike = None
        if loss is None:
            return None
        before = [*self._window][-_WINDOW:]
        median = statistics.median(before) if before else math.nan
        if not is_finite or self._exceeds(loss, median, before):
            position = position or self.position()
            self._spike = Spike(
                step=self._parts.objects.num_steps() + 1 if step is None else step,
                loss=loss,
                median=median,
                samples=None if position is None else position.samples(),
            )
        else:
            self._num_in_row = 0
        if self._spike is not None and self.mode == "warn":
            text = str(self._spike)
            _record(text, self._spike, _facts(self._spike, self._spike.samples), action="warn")
            warn(text)
        if (self._spike is None or self.mode == "warn") and math.isfinite(loss):
            self._window.append(loss)
        return self._spike

    def _exceeds(self, loss: float, median: float, before: list[float]) -> bool:
        if len(before) < _WARM_UP:
            return False
        deviation = statistics.median(abs(one - median) for one in before)
        return loss > median + self._factor * max(1.4826 * deviation, _LEAST_SPREAD * abs(median))

    def _loss_of_update(self) -> tuple[float | None, bool]:
        """Return the mean loss over all ranks, and whether it and the norm are finite. Collective unless the loss is known."""
        parts, driver = self._parts, self._driver
        norm_is_finite = self._norm is None or bool(torch.isfinite(self._norm))
        loss: float | None = self._known
        if loss is None and driver is not None and driver.drives and parts.config.value.parity == "bitwise":
            loss = driver.update_loss()  # does not depend on the number of ranks
        elif loss is None:
            sums = [sum(float(one) * items for one, items in self._losses), sum(items for _, items in self._losses)]
            total, num_items = sums_over_ranks(parts.loss_world, sums)
            loss = total / num_items if num_items else None
        if parts.world.world_size != parts.loss_world.world_size:  # the ranks of other axes may round differently
            values = [0.0 if loss is None else loss, float(norm_is_finite), float(loss is not None)]
            total, num_finite, num_known = sums_over_ranks(parts.world, values)
            norm_is_finite = num_finite == parts.world.world_size
            loss = total / num_known if num_known else None
        return loss, norm_is_finite and (loss is None or math.isfinite(loss))

    def position(self) -> UpdatePosition | None:
        """Return where the current update's samples are; None outside of a loader's loop."""
        state = self._parts.state
        loader = state.reading.trained
        if loader is None:
            return None
        if loader.contribution is not None:
            return UpdatePosition(epoch=loader.iteration, numbers=loader.contribution.update, loader=loader)
        end = loader.num_given
        return UpdatePosition(epoch=loader.iteration, numbers=range(max(0, end - state.num_steps), end))

    # ---- what was dropped --------------------------------------------------------------------------------------------

    def take_back(self) -> float | None:
        """Remove and return the loss of the last update, because that update is undone; None if there is none."""
        return self._window.pop() if self._window else None

    def put_back(self, loss: float | None) -> None:
        """Undo ``take_back``."""
        if loss is not None:
            self._window.append(loss)

    def record_skipped(self, spike: Spike, *, samples: UpdateSamples | None = None, undone: bool = False) -> None:
        """Log and record that the samples of an update are skipped.

        Args:
            spike: why.
            samples: those that are skipped. None: those of the spike.
            undone: whether the update before the spike is undone and skipped, rather than that of the spike.

        Raises:
            LossSpikeError: too many updates in a row were dropped.
        """
        samples = samples or spike.samples
        shown = _("its samples") if samples is None else str(samples)
        if undone:
            text = _(
                "{spike}. The update before it caused it: it is undone, and {samples} are skipped",
                spike=spike,
                samples=shown,
            )
        else:
            text = _("{spike}. The update is dropped: {samples} are skipped", spike=spike, samples=shown)
        _logger.warning("%s", text)
        facts = _facts(spike, samples)
        self.skipped.append({"step": spike.step, "undone": undone, **facts})
        _record(text, spike, facts, action="rollback" if undone else "skip")
        self._num_in_row += 1
        if self._num_in_row > _MAX_IN_ROW:
            raise LossSpikeError(
                _("{num} updates in a row were dropped; the last one: {spike}", num=self._num_in_row, spike=spike),
                where=f"step {spike.step}, spike_guard={self.mode!r} ({self._parts.config.origins['spike_guard']})",
                do=_(
                    "resume from a checkpoint before the first of them, with spike_guard='rollback' (Trainer); if the data has changed, and "
                    "such losses are normal from here on, use spike_guard='warn' or a larger spike_factor"
                ),
            )

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to decide as this one, and the updates that were dropped."""
        return {"losses": list(self._window), "num_in_row": self._num_in_row, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self._window = deque(state["losses"], maxlen=_WINDOW + 1)
        self._num_in_row, self.skipped = state["num_in_row"], list(state["skipped"])
        if self.mode == "skip" and not self.is_driven:
            self._buffers = copy_buffers(self._parts.objects)


def build_spike_guard(parts: UpdateParts, driver: ExactUpdate | None) -> SpikeGuard | None:
    """Return the guard that the settings ask for, or None.

    Raises:
        ConfigError: ``spike_factor`` is set without ``spike_guard``.
    """
    config, origins = parts.config.value, parts.config.origins
    if config.spike_guard is not None:
        return SpikeGuard(parts, driver)
    if origins["spike_factor"].source is not SettingSource.DEFAULT:
        raise ConfigError(
            _("spike_factor={factor} has no effect without spike_guard", factor=config.spike_factor),
            where=str(origins["spike_factor"]),
            do=_("set spike_guard='warn', 'skip' or 'rollback', or remove spike_factor"),
        )
    return None


def _facts(spike: Spike, samples: UpdateSamples | None) -> dict[str, Any]:
    """Return what a checkpoint and the run's record say of a spike and of the samples that it concerns."""
    plain = None if samples is None else asdict(samples)
    if plain is not None and plain["indices"] is not None:
        plain["indices"] = list(plain["indices"])
    return {"loss": spike.loss, "median": spike.median, "samples": plain}


def _record(text: str, spike: Spike, facts: dict[str, Any], *, action: str) -> None:
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.spike(text, step=spike.step, facts={"action": action, **facts})
