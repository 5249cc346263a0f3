"""Records the steps of a training script in this process, without changes to the script.

``recording`` patches torch for the time of its block; the parts (batches, forward passes, gradients, ...) are told through a
``Recording`` which update and micro-step the script is in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.distributed.checks.named_sketches import NamedSketches
from echelon.verify.recorders.models import RecordedModel, model_event, without_wrappers
from echelon.verify.trace import Content, Event, Note, RecordingSettings, SketchedTensors, TraceWriter

OnTrainingForward = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], None]
OnForwardEnd = Callable[[int, nn.Module, Any], None]
OnBackward = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
OnStep = Callable[[Optimizer, float], None]
InputTransform = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class RecordingDone(BaseException):
    """Ends the script after the last recorded update; ``recording`` catches it."""


class Recording:
    """Where the script is: its update, micro-step and models.

    An update is complete after an optimizer step. It is closed (weights are read) when the next training forward pass begins, because
    a sharded engine may still be sending before that.
    """

    def __init__(self, writer: TraceWriter, run: RecordingSettings, *, on_done: Callable[[], None] | None) -> None:
        self.run = run
        self.update = run.first_update
        """The update that the script is in, or that it completed last if no training forward pass has begun since."""
        self.micro_step = 0
        """Number of backward passes that have ended in this update."""
        self.models: list[RecordedModel] = []
        self.is_in_backward = False
        self._writer = writer
        self._on_done = on_done
        self._is_complete = False
        self._was_closed = False
        self._depth = 0
        self._modes: set[bool] = set()  # of the forward passes with gradients since the last backward pass
        self._notes: set[str] = set()
        self._names: dict[int, str] = {}  # by the ids of parameters, which their models keep alive
        self._model_of_root: dict[int, RecordedModel] = {}
        self._other_roots: WeakSet[nn.Module] = WeakSet()
        self._unimported: list[tuple[str, str, str, Callable[..., Any]]] = []
        self.undo = ExitStack()
        """Undoes what the parts have patched, and runs what else they have left for the end of the recording."""

        # Callbacks of the parts.
        self.on_model: list[Callable[[nn.Module], None]] = []
        """``(root)`` before a new model is recorded; they may convert the model in place."""
        self.on_model_recorded: list[Callable[[RecordedModel], None]] = []
        """``(model)`` after the ``Model`` event of a new model, and again if its parameters were replaced."""
        self.input_transforms: list[InputTransform] = []
        """Return what replaces the arguments of a root forward pass (training and evaluation): ``(root, args, kwargs)``."""
        self.on_training_forward: list[OnTrainingForward] = []
        """``(model_index, root, args, kwargs)`` when a training forward pass begins."""
        self.on_forward_end: list[OnForwardEnd] = []
        """``(model_index, root, output)`` when a training forward pass has ended."""
        self.on_other_forward: list[Callable[[nn.Module], None]] = []
        """``(root)`` when the first forward pass of a module begins that is not a training forward pass."""
        self.on_backward: list[OnBackward] = []
        """``(tensors, gradients)`` before an outermost backward pass."""
        self.on_micro_step_end: list[Callable[[], None]] = []
        """``()`` after an outermost backward pass; ``micro_step`` is still its index."""
        self.on_step: list[OnStep] = []
        """``(optimizer, loss_scale)`` before a step, or where a loss scaler skips one. The gradients have still that factor."""
        self.on_update_closed: list[Callable[[int], None]] = []
        """``(update)`` when nothing in the update can change anymore."""

    # What parts call.

    def add(self, event: Event) -> None:
        """Write ``event`` to the trace of this rank."""
        self._writer.add(event)

    def add_tensors(
        self,
        content: Content,
        sketches: NamedSketches,
        *,
        update: int,
        micro_step: int = 0,
        path: str = "",
        line: str = "",
    ) -> None:
        """Write ``sketches`` to the trace of this rank: the whole tensors, and the shards of each replica."""
        for part in sketches.parts():
            self.add(
                SketchedTensors(content=content, update=update, micro_step=micro_step, path=path, line=line, **part)
            )

    def note(self, text: str) -> None:
        """Write a ``Note``, once per text."""
        if text not in self._notes:
            self._notes.add(text)
            self.add(Note(update=self.update, text=text))

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` until the recording ends."""
        if name in vars(owner):
            self.undo.callback(setattr, owner, name, vars(owner)[name])
        else:  # inherited, or found by __getattr__
            self.undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Call ``call(original, *args, **kwargs)`` in place of ``owner.name`` until the recording ends."""
        original = getattr(owner, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        self.patch(owner, name, wrapped)

    def wrap_when_imported(self, module: str, owner: str, name: str, call: Callable[..., Any]) -> None:
        """``wrap`` a method of a class of a library as soon as the script has imported the library."""
        self._unimported.append((module, owner, name, call))
        self.wrap_imported()

    def wrap_imported(self) -> None:
        """Wrap the methods of libraries that the script has imported since; each training forward pass does it, too."""
        for one in list(self._unimported):
            module, owner, name, call = one
            # The class is not there yet while the module is being imported.
            kind: Any = vars(sys.modules[module]).get(owner) if module in sys.modules else None
            if kind is not None:
                self._unimported.remove(one)
                if name in vars(kind):
                    self.wrap(kind, name, call)

    def begin_step(self, optimizer: Optimizer, loss_scale: float) -> None:
        """Tell all parts that ``optimizer`` is about to step."""
        for on_step in self.on_step:
            on_step(optimizer, loss_scale)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter (``"0:weight"`` in model 0), or None if no model is known to have it."""
        return self._names.get(id(parameter))

    @property
    def is_in_evaluation_mode(self) -> bool:
        """Whether there were forward passes with gradients since the last backward pass, all in evaluation mode."""
        return self._modes == {False}

    @property
    def last_update(self) -> int:
        """The last update that is complete; ``first_update - 1`` if none is."""
        return self.update if self._is_complete or self._was_closed else self.update - 1

    def complete_update(self) -> None:
        """Mark the update as complete: an optimizer has stepped, or a loss scaler has skipped its step."""
        self._is_complete = True

    # What ``recording`` calls.

    def finish(self) -> None:
        """Close the last update if it is complete."""
        if self._is_complete:
            self._close()

    def call_module(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._depth or self.is_in_backward:
            return call(module, *args, **kwargs)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            self._see_other(module)
            return call(module, *args, **kwargs)
        return self._run_root(call, module, args, kwargs)

    def _run_root(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        root = without_wrappers(module)
        is_training = root.training and torch.is_grad_enabled()
        if self._is_complete and (is_training or self._is_last()):
            self._close()
            self._end_if_done()
        if torch.is_grad_enabled():
            self._modes.add(root.training)
        if is_training:
            self.wrap_imported()
            self._begin_update_if_needed()
        model = self._find_model(root) if is_training else None
        if model is None:
            self._see_other(module)
        for transform in self.input_transforms:
            args, kwargs = transform(root, args, kwargs)
        if model is not None:
            for on_forward in self.on_training_forward:
                on_forward(model.index, root, args, kwargs)
        self._depth += 1
        try:
            output = call(module, *args, **kwargs)
        finally:
            self._depth -= 1
        if model is not None:
            for on_end in self.on_forward_end:
                on_end(model.index, root, output)
        return output

    def run_backward(
        self, run: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if self.is_in_backward:  # of a checkpointed block
            run(tensors, grad_tensors, *args, **kwargs)
            return
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        is_one = grad_tensors is None or isinstance(grad_tensors, torch.Tensor)
        given = [grad_tensors] if is_one else list(grad_tensors)
        for on_backward in self.on_backward:
            on_backward(losses, given + [None] * (len(losses) - len(given)))
        self.is_in_backward = True
        try:
            run(tensors, grad_tensors, *args, **kwargs)
        finally:
            self.is_in_backward = False
        for on_end in self.on_micro_step_end:
            on_end()
        self.micro_step += 1
        self._modes.clear()
        self._writer.flush()  # the process may hang in the step

    def _see_other(self, module: nn.Module) -> None:
        if not self.models or module in self._other_roots:
            return  # without a model it cannot be known what the module is
        self._other_roots.add(module)
        for on_other in self.on_other_forward:
            on_other(without_wrappers(module))

    def _find_model(self, root: nn.Module) -> RecordedModel:
        known = self._model_of_root.get(id(root))
        if known is None:
            known = next((model for model in self.models if model.contains(root)), None)
            if known is None:
                for convert in self.on_model:
                    convert(root)
                known = RecordedModel(root, index=len(self.models))
                self.models.append(known)
                self._note_names(known)
                self.add(model_event(known))
                for on_recorded in self.on_model_recorded:
                    on_recorded(known)
            self._model_of_root[id(root)] = known
            known.roots.append(root)  # keeps the id valid
        elif known.is_stale():
            known.refresh()
            self._note_names(known)
            for on_recorded in self.on_model_recorded:
                on_recorded(known)
        return known

    def _note_names(self, model: RecordedModel) -> None:
        for name, parameter in model.parameters.items():
            self._names.setdefault(id(parameter), f"{model.index}:{name}")

    def _begin_update_if_needed(self) -> None:
        if self._was_closed:
            self._was_closed = False
            self.update += 1
            self.micro_step = 0

    def _close(self) -> None:
        self._is_complete = False
        self._was_closed = True
        for on_closed in self.on_update_closed:
            on_closed(self.update)
        self._writer.flush()

    def _is_last(self) -> bool:
        return self.update + 1 >= self.run.first_update + self.run.steps

    def _end_if_done(self) -> None:
        if self._is_last():
            if self._on_done is not None:
                self._on_done()
            raise RecordingDone


@contextmanager
def recording(
    folder: Path, run: RecordingSettings, *, rank: int, on_done: Callable[[], None] | None = None
) -> Iterator[Recording]:
    """Record what happens in the block, until ``run.steps`` updates are complete.

    The block first constructs what records (``parts.record_everything(recording)``).

    Args:
        folder: the folder of the run; this process writes ``rank_<rank>.trace.jsonl``.
        run: what is recorded; the next forward pass after the last update raises ``RecordingDone``, which ends the block.
        on_done: function that is called after the last update, before ``RecordingDone`` is raised; it may leave the process.
    """
    writer = TraceWriter(folder, rank)
    writer.add(run)
    one = Recording(writer, run, on_done=on_done)
    with one.undo:
        one.undo.callback(writer.close)
        one.wrap(nn.Module, "__call__", one.call_module)
        one.wrap(torch.autograd, "backward", one.run_backward)
        try:
            yield one
        except RecordingDone:
            return
        one.finish()
