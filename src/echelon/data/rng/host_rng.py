"""Synchronizes this process's RNG states with rank zero's, and records them so that a batch can be read again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from echelon.base.errors import UsageError
from echelon.distributed.collectives import broadcast
from echelon.status.notes import communicating

_NUMPY: Any = np.random  # numpy's stubs lack get_bit_generator


def other_states() -> dict[str, Any]:
    """Return the states of ``random`` and NumPy's global generator in a form that can be compared."""
    if isinstance(_NUMPY.get_bit_generator(), np.random.MT19937):
        kind, keys, *rest = _NUMPY.get_state()
        return {"random": random.getstate(), "numpy": (kind, keys.tobytes(), *rest)}
    return {"random": random.getstate(), "numpy": _with_lists(_NUMPY.get_state(legacy=False))}


def _with_lists(state: Any) -> Any:
    """Replace the arrays in the state of a bit generator, which sets lists as well."""
    if isinstance(state, dict):
        return {key: _with_lists(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def set_other_states(states: Mapping[str, Any]) -> None:
    """Restore the states from ``other_states``, if ``states`` contains them."""
    if "random" in states:
        random.setstate(states["random"])
        state = states["numpy"]
        if not isinstance(state, dict):  # that of MT19937
            kind, keys, *rest = state
            state = (kind, np.frombuffer(keys, dtype=np.uint32), *rest)
        np.random.set_state(state)


class OtherDraws:
    """Detects whether reading samples uses ``random`` or NumPy's generator, whose states are slow to copy.

    It compares the states at the 1st, 2nd, 4th, 8th, ... batch until it detects that either generator was used.
    """

    def __init__(self, *, are_used: bool = False) -> None:
        self.are_used = are_used
        self._num = 0
        self._before: dict[str, Any] | None = None

    def before(self) -> dict[str, Any] | None:
        """Return the states before a batch is read if they are in use or are compared at this batch, else None."""
        self._num += 1
        is_compared = self.are_used or self._num & (self._num - 1) == 0
        self._before = other_states() if is_compared else None
        return self._before

    def after(self) -> None:
        """Compare the states after the batch has been read."""
        if not self.are_used and self._before is not None:
            self.are_used = other_states() != self._before


class HostDraws:
    """Records and restores the RNG states that a loader uses when it reads in this process.

    Args:
        is_of_a_batch: whether to record states before each batch. To keep the cost negligible, those of ``random`` and NumPy
            are recorded only if ``others`` requires it. If False, all states are recorded once before a pass.
        others: this loader's detector, which all its passes share.
    """

    def __init__(self, generators: Sequence[torch.Generator], *, is_of_a_batch: bool, others: OtherDraws) -> None:
        self.is_of_a_batch = is_of_a_batch
        self._generators = generators
        self._others = others
        self.recorded: dict[str, Any] = {}
        """The most recently recorded states."""

    def take(self, _batch: object = None) -> None:
        """Record the current states before a batch (or a pass) is read. An observer of passes gives the current batch."""
        if self.is_of_a_batch:
            generators = [generator.get_state() for generator in self._generators]
            others = self._others.before() or {}
            self.recorded = {"torch": torch.default_generator.get_state(), "generators": generators, **others}
        else:
            self.recorded = self._current_states()

    def end_batch(self, _batch: object = None, _facts: object = None) -> None:
        """Update the detector after a batch has been read. An observer of passes gives the current batch and its facts."""
        if self.is_of_a_batch:
            self._others.after()

    def restore(self, states: dict[str, Any]) -> None:
        """Set the states from ``recorded``."""
        self.recorded = states
        self._set(states)

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Restore all states when the block ends."""
        before = self._current_states()
        try:
            yield
        finally:
            self._set(before)

    def _current_states(self) -> dict[str, Any]:
        generators = [generator.get_state() for generator in self._generators]
        return {"torch": torch.get_rng_state(), "generators": generators, **other_states()}

    def _set(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["torch"])
        for generator, state in zip(self._generators, states["generators"]):
            generator.set_state(state)
        set_other_states(states)


@communicating
def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Broadcast rank zero's RNG state to all ranks, for each type in ``rng_types``.

    Args:
        rng_types: ``torch`` (CPU), ``generator``, or the type of an accelerator (``cuda``, ``xpu``, ...).

    Collective: call on every rank.

    Raises:
        UsageError: a type is unknown, the accelerator is unavailable, or ``generator`` is missing.

    Examples:
        >>> synchronize_rng_states(["torch"])
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Broadcast rank zero's RNG state of one type to all ranks. Collective. See ``synchronize_rng_states``."""
    kind = str(getattr(rng_type, "value", rng_type))
    if kind == "torch":
        torch.set_rng_state(broadcast(torch.get_rng_state()))
    elif kind == "generator":
        if generator is None:
            raise UsageError("rng_types contains 'generator', but generator is None", do="pass generator=")
        generator.set_state(broadcast(generator.get_state()))
    else:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type != kind:
            here = "torch, generator" + (f", {accelerator.type}" if accelerator is not None else "")
            raise UsageError(
                f"rng_types={kind!r} is not available on this machine; available types: {here}",
                where="rng_types",
                do=f"use any of {here}",
            )
        module: Any = torch.get_device_module(accelerator)
        module.set_rng_state(broadcast(module.get_rng_state()))
