"""Contexts of a loop: ``accumulate()``, ``no_sync()``, ``trigger_sync_in_backward()`` and ``join_uneven_inputs()``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from echelon.accelerator.current import living_accelerators
from echelon.accelerator.session import Session
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.accelerator.update.unprepared_optimizer import UnpreparedOptimizerGuard
from echelon.accelerator.update.update_policy import UpdatePolicy
from echelon.base.errors import UsageError
from echelon.distributed.uncompiled import uncompiled


class MicroStep:
    """Context returned by ``accumulate()``, written as a class because a generator costs several microseconds per step."""

    __slots__ = ("_local", "_models", "_update")

    def __init__(self, update: UpdatePolicy, models: tuple[nn.Module, ...]) -> None:
        self._update = update
        self._models = models
        self._local: AbstractContextManager[Any] | None = None

    @uncompiled
    def __enter__(self) -> None:
        update, given = self._update, self._models
        should_sync = update.count_micro_batch()
        if update.objects.has_compiled:
            given = tuple(map(update.objects.engine_model, given))
        update.accumulating = given
        if not should_sync:
            self._local = stack = ExitStack()
            for model in given or update.objects.models:
                stack.enter_context(update.engine.no_sync(model))

    @uncompiled
    def __exit__(self, *_: object) -> None:
        update = self._update
        update.accumulating = None
        if update.state.sync_gradients and not update.drives:
            update.window.is_open = False
            update.epochs.update_begin = None
            update.state.micro_step = 0
        if self._local is not None:
            self._local.__exit__(None, None, None)


class LocalBackward:
    """Context of ``no_sync()``."""

    __slots__ = ("_context", "_optimizers")

    def __init__(
        self,
        context: AbstractContextManager[Any],
        optimizers: Iterable[AcceleratedOptimizer | UnpreparedOptimizerGuard],
    ) -> None:
        self._context = context
        self._optimizers = list(optimizers)

    @uncompiled
    def __enter__(self) -> None:
        self._context.__enter__()
        for optimizer in self._optimizers:
            optimizer.unsynced = True

    @uncompiled
    def __exit__(self, *details: Any) -> None:
        for optimizer in self._optimizers:
            optimizer.unsynced = False
        self._context.__exit__(*details)


def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which backward synchronizes gradients even if the forward passes ran in ``no_sync``.

    Use this context if several forward passes run in ``no_sync`` before the first backward pass: run the last backward
    pass in this context, which reduces the gradients of all of them. As in Accelerate, the method is static; it finds
    the Accelerator that prepared ``model``. For an unprepared model, the context does nothing.

    Collective: run the backward pass inside it on every rank.

    Examples:
        >>> with accelerator.no_sync(model):
        ...     first, second = model(x).mean(), model(x).mean()
        >>> accelerator.backward(first)
        >>> with accelerator.trigger_sync_in_backward(model):
        ...     accelerator.backward(second)
    """
    for accelerator in living_accelerators():
        session: Session = accelerator.session
        inner = session.objects.engine_model(model)
        if any(inner is known for known in session.objects.models):
            return session.engine.sync_next_backward(inner)
    return nullcontext()


# ---- ranks that run out of batches -----------------------------------------------------------------------------------


@contextmanager
def join_uneven_inputs(session: Session, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
    """Allow processes to run out of batches at different steps while others continue training.

    Args:
        joinables: prepared models (optimizers are not needed).
        even_batches: ``even_batches`` of prepared loaders inside the block. None: unchanged.

    Collective: enter on every process.

    Raises:
            UsageError: one of ``joinables`` was not prepared (checked on several processes), or ``spike_guard`` is set.

    Examples:
        >>> with accelerator.join_uneven_inputs([model], even_batches=False):
        ...     for x, y in loader:
        ...         accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    objects, reading = session.objects, session.gradient_state.reading
    prepared = [*objects.models, *objects.optimizers, *(optimizer.optimizer for optimizer in objects.optimizers)]
    is_alone = session.data_world.world_size == 1
    unknown = [one for one in joinables if not is_alone and all(one is not known for known in prepared)]
    if unknown:
        raise UsageError(
            "join_uneven_inputs() got objects that were not prepared by this Accelerator: "
            f"{', '.join(type(one).__name__ for one in unknown)}",
            do="pass the models that prepare() returned",
        )
    if session.update.spikes is not None:
        raise UsageError(
            "join_uneven_inputs() cannot be used with spike_guard, which compares the loss of each update over all ranks",
            where=str(session.config.origins["spike_guard"]),
            do="remove spike_guard, or use even_batches=True without join_uneven_inputs()",
        )
    before = [(loader, loader.even_batches) for loader in objects.loaders]
    if even_batches is not None:
        for loader in objects.loaders:
            loader.even_batches = even_batches
    reading.joined = session.capabilities.joins_uneven
    try:
        with session.engine.join([objects.engine_model(model) for model in joinables if isinstance(model, nn.Module)]):
            yield
    finally:
        reading.joined = False
        for loader, value in before:
            loader.even_batches = value
