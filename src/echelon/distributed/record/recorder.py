"""Records this process's part of a run: a record per optimizer step, the values that the program logs, and checkpoints."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from multiprocessing import util
from numbers import Real
from pathlib import Path
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from echelon.base.device import used_memory_mb
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _
from echelon.base.rank import known_rank
from echelon.base.warnings import warn_here
from echelon.distributed.record.device_values import DeviceValues
from echelon.distributed.record.object_facts import optimizer_facts, parameter_counts
from echelon.distributed.record.run_place import LaunchedRun, Run, RunPlace, RunWithoutLauncher
from echelon.distributed.torch_hooks import Closure, watch_optimizer_steps
from echelon.status.board import StepPart
from echelon.status.hyperparameters import Group, plain_hyperparameters
from echelon.status.notes import Notes, notes_of_process
from echelon.status.run_files import (
    EVENTS_FILE,
    HYPERPARAMETERS_FILE,
    METRICS_FILE,
    append_line,
    event_texts,
    steps_path,
)
from echelon.status.step_records import StepRecorder
from echelon.world.launch_variables import is_recording_off, recorded_run

_logger = get_logger(__name__)
_EVERY_NS = 10**9
_RETRY_NS = 10**8
_NO_TIMES = (0,) * len(StepPart)
_MAX_WAITING = 1000
_MAX_OBJECTS = 20


@final
class ProcessRecorder:
    """Records this process's part of a run. If a file cannot be written, it warns once and stops; the run continues.

    Args:
        run: the run that this process belongs to.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pid = os.getpid()
        self._place: RunPlace | None = None
        self._steps: StepRecorder | None = None
        self._on_device: DeviceValues | None = None
        self._notes: Notes | None = None
        self._device = torch.device("cpu")
        self._is_off = False
        self._told_of_bad_loss = False
        self._steps_before = self._last = 0
        self._leader: Callable[[], Optimizer | None] = _no_optimizer
        """Returns the optimizer whose steps are recorded."""
        self._follower: Callable[[], Optimizer | None] = _no_optimizer
        """Returns another optimizer that has stepped since the last step of the leader."""
        self._loss_sum, self._num_losses = 0.0, 0
        self._norm = math.nan
        self.num_samples = 0
        """Number of samples that this process has read for training; a loader adds those of each batch."""
        self._num_items = 0.0
        self._next_ns = 0
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        """Lines to write when the folder has been created."""
        self._objects: dict[str, list[dict[str, Any]]] = {}
        """By kind, the facts of the optimizers, models and loaders that were recorded."""
        self._plain_steps: _PlainSteps | None = None
        self._is_prepared = False
        util.Finalize(None, self.close, exitpriority=1)  # also called in processes that multiprocessing started

    # ---- steps -------------------------------------------------------------------------------------------------------

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-step, a real number. If it is on a device, it is read later."""
        if self._is_off or type(loss) is not torch.Tensor:
            return
        if loss.is_cpu:
            self._loss_sum += loss.item()
            self._num_losses += 1
        else:
            self._values_on_device().add_loss(loss)

    def set_norm(self, norm: Any) -> None:
        """Set the norm of the current step's gradients before clipping. If it is on a device, it is read later."""
        if self._is_off or type(norm) is not torch.Tensor:
            return
        if norm.is_cpu:
            self._norm = norm.item()
        else:
            self._values_on_device().set_norm(norm)

    def _values_on_device(self) -> DeviceValues:
        if self._on_device is None:
            self._on_device = DeviceValues()
        return self._on_device

    def add_items(self, num_items: float) -> None:
        """Add the items (``num_items=``) of a micro-step of this process."""
        self._num_items += float(num_items)  # it may be a tensor

    def step(self, num_steps: int, optimizer: Optimizer) -> None:
        """Record an optimizer step.

        Args:
            num_steps: number of steps that ``optimizer`` has taken. Only the optimizer with the most steps is recorded.
            optimizer: the optimizer, for its learning rate.
        """
        if self._is_off:
            return
        if optimizer is self._leader():
            self._follower = _no_optimizer
            if num_steps <= self._last - self._steps_before:  # another Accelerator counts its steps anew
                self._steps_before = self._last + 1 - num_steps
        elif not self._takes_over(optimizer, num_steps):
            return
        self._last = number = self._steps_before + num_steps
        if (now := time.monotonic_ns()) >= self._next_ns:
            self._update(optimizer, now)
        steps = self._steps
        if steps is None or self._is_off:
            return
        steps.loss_sum, steps.num_losses = steps.loss_sum + self._loss_sum, steps.num_losses + self._num_losses
        self._loss_sum, self._num_losses = 0.0, 0
        steps.grad_norm, self._norm = self._norm, math.nan
        steps.num_samples, steps.num_items = self.num_samples, self._num_items
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        try:
            place = steps.record(
                number,
                rate if type(rate) is float else _learning_rate(rate),
                _NO_TIMES if self._notes is None else self._notes.spent_ns,
            )
        except OSError as error:
            self._give_up(error)
            return
        if place and self._on_device is not None:
            self._on_device.end_step(steps, place)

    def _update(self, optimizer: Optimizer, now: int) -> None:
        """Do what is not done at every step: create the file, read the used memory, and tell that the run goes on."""
        if os.getpid() != self._pid:
            self._is_off = True  # only the process itself records its steps, not one that it has forked
            return
        self._next_ns = now + _EVERY_NS
        if self._steps is None:
            self._steps = self._start(optimizer)
        if self._steps is None:  # not again at each step: it asks the store whether rank 0 has told the run's name
            self._next_ns = now + _RETRY_NS
            return
        self._steps.memory_mb = used_memory_mb(self._device)
        self._tell_of_bad_loss(self._steps)
        try:
            self._run.update()
        except OSError as error:
            self._give_up(error)

    def _tell_of_bad_loss(self, steps: StepRecorder) -> None:
        """Log the first loss that is nan or infinite once, on rank 0."""
        if steps.first_bad_loss is None or self._told_of_bad_loss:
            return
        self._told_of_bad_loss = True
        if known_rank() in (None, 0):
            step, loss = steps.first_bad_loss
            text = _(
                "the loss is {loss} at step {step}: look for inputs that are nan or infinite, divisions "
                "by zero, and a learning rate that is too high. Training continues; spike_guard='skip' drops such updates",
                loss=loss,
                step=step,
            )
            _logger.warning("%s", text)

    def _takes_over(self, optimizer: Optimizer, num_steps: int) -> bool:
        """Return whether ``optimizer`` has the most steps now, or has replaced one of a finished training."""
        if self._leader() is None or num_steps > self._last - self._steps_before or optimizer is self._follower():
            self._leader, self._follower = weakref.ref(optimizer), _no_optimizer
            self._steps_before = max(self._steps_before, self._last + 1 - num_steps)
        else:
            self._follower = weakref.ref(optimizer)
            return False
        return True

    def resume(self, step: int, *, num_steps: int = 0) -> None:
        """Continue after step ``step`` of the run, at which the optimizer's own count is ``num_steps`` (see ``step``)."""
        self._last, self._steps_before = step, step - num_steps

    def watch_plain_optimizers(self) -> None:
        """Record the steps of this process's optimizers, until an Accelerator reports its own."""
        self._run.publish()
        if not self._is_prepared and self._plain_steps is None:
            self._plain_steps = _PlainSteps(self)

    def stop_watching(self) -> None:
        """Stop recording the steps of plain optimizers."""
        if self._plain_steps is not None:
            self._plain_steps.stop()
            self._plain_steps = None

    def leave_to_accelerator(self) -> None:
        """Record only the steps that an Accelerator reports."""
        self._run.publish()
        self._is_prepared = True
        self.stop_watching()

    def _start(self, optimizer: Optimizer) -> StepRecorder | None:
        """Create this process's file, or return None if it cannot be created, or not yet."""
        try:
            place = self._run.place()
            if place is None:
                return None
            path = steps_path(place.folder, attempt=place.attempt, rank=place.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            steps = StepRecorder(path, rank=place.rank, world_size=place.world_size)
        except FileExistsError:
            self._is_off = True  # a program that a rank has started, with the rank's environment
            return None
        except OSError as error:
            self._give_up(error)
            return None
        steps.before_merge = self._before_merge
        self._place, self._notes = place, notes_of_process()
        self._device = next((p.device for group in optimizer.param_groups for p in group["params"]), self._device)
        for file, line in self._waiting:
            self._append(file, line)
        self._waiting.clear()
        return None if self._is_off else steps

    def _before_merge(self) -> None:
        if self._on_device is not None and self._steps is not None:
            self._on_device.fill_in_all(self._steps)

    # ---- values and events -------------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any], *, step: int | None = None, epoch: float | None = None) -> None:
        """Record the numbers in ``values``, on rank 0. Waits for those that are on a device."""
        if known_rank() in (None, 0) and (numbers := _numbers(values)):
            number = (self._last or None) if step is None else _step_number(step)
            self._write(METRICS_FILE, {"step": number, "epoch": epoch, "values": numbers})

    def log_hyperparameters(self, group: Group, values: Mapping[str, Any], *, defaults: Sequence[str] = ()) -> None:
        """Record, on rank 0, what the run is run with.

        Args:
            group: who named the values.
            values: values of any types; what JSON does not have becomes text, and secrets are hidden.
            defaults: names of values that are the defaults; those of nested values are joined with dots.
        """
        if known_rank() in (None, 0):
            line = {
                "group": group,
                "values": plain_hyperparameters(values),
                **({"defaults": [*defaults]} if defaults else {}),
            }
            self._write(HYPERPARAMETERS_FILE, line)

    def add_object(self, kind: str, facts: Mapping[str, Any], defaults: Sequence[str] = ()) -> None:
        """Record, on rank 0, the facts of an optimizer, a model or a loader, unless equal ones have been recorded.

        A program that makes new objects again and again, as a search for hyperparameters does, has its first ones recorded.
        """
        known, plain = self._objects.setdefault(kind, []), plain_hyperparameters(facts)
        if plain in known or len(known) >= _MAX_OBJECTS:
            return
        known.append(plain)
        name = kind if len(known) == 1 else f"{kind} {len(known)}"
        self.log_hyperparameters("training", {name: plain}, defaults=[f"{name}.{fact}" for fact in defaults])

    def checkpoint(self, path: Path | str, *, step: int | None, duration_s: float) -> None:
        """Record that the run's state at ``step`` has been saved at a path or URL. Called on rank 0, possibly in a thread."""
        facts = {"path": path if isinstance(path, str) else str(path.absolute()), "duration_s": round(duration_s, 6)}
        text = _("saved step {step} to {path} in {seconds:.1f} s", step=step, path=path, seconds=duration_s)
        self._write(EVENTS_FILE, {"kind": "checkpoint", "rank": 0, "step": step, **event_texts(text), **facts})

    def resumed(self, step: int) -> None:
        """Record, on rank 0, that the run continues after step ``step``."""
        if known_rank() in (None, 0):
            text = _("resumed at step {step}", step=step)
            self._write(EVENTS_FILE, {"kind": "resume", "rank": 0, "step": step, **event_texts(text)})

    def spike(self, text: str, *, step: int, facts: Mapping[str, Any]) -> None:
        """Record, on rank 0, that ``spike_guard`` has acted on the update of ``step``."""
        if known_rank() in (None, 0):
            self._write(EVENTS_FILE, {"kind": "spike", "rank": None, "step": step, **event_texts(text), **facts})

    def _write(self, file: str, line: dict[str, Any]) -> None:
        if self._is_off:
            return
        line = {"time": round(time.time(), 6), "attempt": 0, **line}
        if self._place is None and isinstance(self._run, LaunchedRun):
            self._place = self._run.place()
        if self._place is not None:
            self._append(file, line)
        elif len(self._waiting) < _MAX_WAITING:
            self._waiting.append((file, line))

    def _append(self, file: str, line: dict[str, Any]) -> None:
        if self._place is None or self._is_off:
            return
        try:
            append_line(self._place.folder / file, {**line, "attempt": self._place.attempt})
        except OSError as error:
            self._give_up(error)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _give_up(self, error: OSError) -> None:
        self._is_off = True
        self._on_device = None
        warn_here(
            _(
                "this process no longer records its run, because a file cannot be written: {error}. The run "
                "continues (echelon launch --log_dir DIR chooses another folder, --no_record none)",
                error=error,
            )
        )

    def close(self) -> None:
        """Complete the records of this process, which is about to end."""
        self.stop_watching()
        steps, self._steps = self._steps, None
        if steps is None or self._is_off:
            return
        self._is_off = True
        try:
            if self._on_device is not None:
                self._on_device.fill_in_all(steps)
        except RuntimeError:
            pass  # the device has failed; the error that ends the program says so
        self._tell_of_bad_loss(steps)
        try:
            steps.close()
            self._run.end()
        except OSError as error:
            self._give_up(error)


class _PlainSteps:
    """Counts the steps of optimizers that no Accelerator has prepared."""

    def __init__(self, recorder: ProcessRecorder) -> None:
        self._recorder = recorder
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.stop: Callable[[], object] = watch_optimizer_steps(self, _PlainSteps._before_step)

    def _before_step(self, optimizer: Optimizer, _closure: Closure | None) -> None:
        self._counts[optimizer] = number = self._counts.get(optimizer, 0) + 1
        if number == 1:
            trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
            facts, defaults = optimizer_facts(optimizer)
            self._recorder.add_object("optimizer", {**facts, **parameter_counts(trained)}, defaults)
        self._recorder.step(number, optimizer)


def recorder_of_process() -> ProcessRecorder | None:
    """Return this process's recorder, or None if its run is not recorded."""
    if is_recording_off():
        return None
    return _open(os.getpid(), recorded_run())


# One per process, because its counts are those of the process.
@lru_cache(maxsize=1)
def _open(_pid: int, place: str | None) -> ProcessRecorder | None:
    if get_worker_info() is not None:  # a DataLoader's worker, which has inherited the rank's environment
        return None
    return ProcessRecorder(RunWithoutLauncher() if place is None else LaunchedRun(place))


def _no_optimizer() -> None:
    return None


def _learning_rate(rate: Any) -> float:
    """Return ``rate`` as a number; nan if it is none, as in optimizers that compute their rate (Adafactor's is None)."""
    if isinstance(rate, torch.Tensor):
        # Reading it on a device would wait for the device.
        return float(rate.item()) if rate.is_cpu and rate.numel() == 1 and not rate.is_complex() else math.nan
    return float(rate) if isinstance(rate, Real) else math.nan


def _step_number(step: Any) -> int | float | None:
    """Return ``step``, also numpy's or a tensor, as a number that JSON can contain; None if it is none."""
    number = _numbers({"step": step}).get("step")
    return int(number) if number is not None and number == number // 1 else number


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, Real):  # also numpy's
            numbers[str(name)] = int(value) if isinstance(value, int) else float(value)
    return numbers
