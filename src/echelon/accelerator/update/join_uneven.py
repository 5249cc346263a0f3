"""``Accelerator.join_uneven_inputs``, for ranks that run out of batches at different steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from echelon.accelerator.session import Session
from echelon.base.errors import UsageError

__all__ = ["join_uneven_inputs"]


@contextmanager
def join_uneven_inputs(session: Session, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
    """Allow processes to run out of batches at different steps while others continue training.

    Args:
        joinables: prepared models (optimizers are not needed).
        even_batches: ``even_batches`` of prepared loaders inside the block. None: unchanged.

    Collective: enter on every process.

    Raises:
            UsageError: one of ``joinables`` was not prepared (checked on several processes).
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
