"""Detects unprepared loaders and models on several ranks, which repeat data or do not reduce gradients."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from echelon.accelerator.gradient_state import GradientState
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import UserLine, user_line, warn
from echelon.data.loader import PreparedLoader
from echelon.distributed.checks.already_sharded import find_existing_sharding
from echelon.distributed.shard import ShardedLoader
from echelon.distributed.torch_hooks import watch_calls
from echelon.status.call_site import CallSite, current_call_site


class UnpreparedModelCheck:
    """Checks at the first backward pass with multiple processes that the loader and the model were prepared.

    Args:
        num_processes: number of processes in the run.
        state: tells whether a prepared loader is being iterated over.
        loaders: the prepared loaders.
    """

    def __init__(self, *, num_processes: int, state: GradientState, loaders: Sequence[PreparedLoader]) -> None:
        self._num_processes = num_processes
        self._state = state
        self._loaders = loaders
        self._allowed: list[DataLoader[Any]] = []
        # By iterator, while it is alive: where its pass began. The loader is gone in `for batch in DataLoader(...)`.
        self._passes: WeakKeyDictionary[Any, CallSite] = WeakKeyDictionary()
        self._stop: Callable[[], object] = _do_nothing
        self.is_pending = num_processes > 1
        """Whether no backward pass has run yet."""
        if self.is_pending:
            self._stop = watch_calls(self, DataLoader, "__iter__", UnpreparedModelCheck._add_pass)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_allowed": [], "_loaders": (), "_passes": {}, "_stop": _do_nothing}

    def allow(self, loader: DataLoader[Any]) -> None:
        """Allow every process to read all of ``loader``."""
        self._allowed.append(loader)

    def _add_pass(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Record that a pass begins over a loader that gives the same data to every process."""
        self._passes.pop(iterator, None)  # persistent workers keep their iterator
        if not any(loader is one for one in self._allowed) and _gives_all_ranks_the_same(loader, self._loaders):
            self._passes[iterator] = current_call_site()

    def run(self, models: Sequence[nn.Module], *, averaged: Sequence[nn.Parameter]) -> None:
        """Run the check at the first backward pass.

        Args:
            models: the prepared models.
            averaged: parameters of no prepared model whose gradients the engine averages before the step.

        Raises:
            UsageError: a loader yields the same data on every process.
        """
        self._end()
        lines = list(self._passes.values())
        self._passes.clear()
        if lines and not self._state.in_dataloader:
            raise _error(lines[-1], self._num_processes)
        if not models:
            ids = frozenset(map(id, averaged))
            _warn_of_unprepared_model("backward()", num_processes=self._num_processes, averaged=ids)

    def _end(self) -> None:
        self.is_pending = False
        self._stop()

    def run_before_step(self) -> None:
        """Run the check before an optimizer step in a prepared loader's loop, if no model or optimizer was prepared."""
        self._end()
        _warn_of_unprepared_model("step()", num_processes=self._num_processes)


def _warn_of_unprepared_model(call: str, *, num_processes: int, averaged: frozenset[int] = frozenset()) -> None:
    """Warn if the user's frames contain a trainable model, but none whose gradients are averaged.

    Called at the first ``call`` on an Accelerator that has no prepared models. Of a model whose parameters' ids are in
    ``averaged``, the engine warns at the first step, when it averages their gradients.
    """
    place = user_line()
    models = [(name, value) for name, value in _variables_of_script(place) if isinstance(value, nn.Module)]
    if any(map(_averages_gradients, (model for _, model in models))):
        return
    trained = [
        name for name, model in models if any(p.requires_grad and id(p) not in averaged for p in model.parameters())
    ]
    if trained:
        warn(
            _(
                "{call} runs on {num_processes} processes, but no model was passed to this Accelerator's prepare(): "
                "each process trains a separate model, because nothing averages the gradients. Write {trained} = "
                "accelerator.prepare({trained})",
                call=call,
                num_processes=num_processes,
                trained=trained[0],
            )
        )


def _averages_gradients(model: nn.Module) -> bool:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return True
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - not needed by a single process

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _variables_of_script(place: UserLine) -> Iterator[tuple[str, Any]]:
    """Yield the variables visible in the frames of the user's script, innermost frame first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == place[0]:
            variables = _variables(frame)
            yield from variables.items()
            yield from getattr(variables.get("self"), "__dict__", {}).items()
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables visible in ``frame``."""
    of_frame = frame.f_locals
    variables = {**frame.f_globals, **of_frame}
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        of_frame.clear()  # this copy stays with the frame and would keep a model alive after the user's del
    return variables


def _gives_all_ranks_the_same(loader: DataLoader[Any], prepared: Sequence[PreparedLoader]) -> bool:
    if isinstance(loader, (PreparedLoader, ShardedLoader)) or any(loader is one.inner for one in prepared):
        return False
    sharding = find_existing_sharding(loader)
    return sharding is None or sharding.num_shards == 1


def _error(place: CallSite, num_processes: int) -> UsageError:
    return UsageError(
        _(
            "backward() runs on {num_processes} processes outside the loop of a prepared loader, and the DataLoader "
            "that is iterated over at {file}:{line} was not prepared, so every process would train on the same samples",
            num_processes=num_processes,
            file=place.file,
            line=place.line,
        ),
        where=str(user_line()),
        do=_(
            "call loader = accelerator.prepare(loader), or accelerator.allow_unsharded(loader) if every process should "
            "read all of it"
        ),
    )


def _do_nothing() -> None:
    pass
