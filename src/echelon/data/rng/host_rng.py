"""Random states: the same on all ranks, copied from rank zero; and those that a batch was read with, to read it again."""

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

__all__ = [
    "HostDraws",
    "OtherDraws",
    "other_states",
    "set_other_states",
    "synchronize_rng_state",
    "synchronize_rng_states",
]


def other_states() -> dict[str, Any]:
    """Return the states of ``random`` and of numpy's global generator, comparable."""
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    return {"random": random.getstate(), "numpy": (kind, keys.tobytes(), *rest)}


def set_other_states(states: Mapping[str, Any]) -> None:
    """Set what ``other_states`` returned, if ``states`` has it."""
    if "random" in states:
        random.setstate(states["random"])
        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))


class OtherDraws:
    """Finds out whether whoever reads samples draws from ``random`` or numpy, whose states take long to be noted.

    It looks at the 1st, 2nd, 4th, 8th, ... batch until it has seen that they are drawn from.
    """

    def __init__(self, *, are_used: bool = False) -> None:
        self.are_used = are_used
        self._num = 0
        self._before: dict[str, Any] | None = None

    def before(self) -> dict[str, Any] | None:
        """A batch is about to be read: return the states if it is looked at, or if they are used."""
        self._num += 1
        looks = self.are_used or self._num & (self._num - 1) == 0
        self._before = other_states() if looks else None
        return self._before

    def after(self) -> None:
        """The batch was read."""
        if not self.are_used and self._before is not None:
            self.are_used = other_states() != self._before


class HostDraws:
    """The random states of this process from which a loader reads.

    Args:
        generators: the loader's own.
        is_of_a_batch: they are taken before each batch, and those of ``random`` and numpy only where ``others`` says so: it
            costs next to nothing; else once before a pass, and all.
        others: of this loader, over all its passes.
    """

    def __init__(self, generators: Sequence[torch.Generator], *, is_of_a_batch: bool, others: OtherDraws) -> None:
        self.is_of_a_batch = is_of_a_batch
        self._generators = generators
        self._others = others
        self._states: dict[str, Any] = {}

    def take(self) -> None:
        """Note the states of now: a batch (or a pass) is about to be read."""
        if self.is_of_a_batch:
            self._states = self._now(whole=False)
            if others := self._others.before():
                self._states |= others
        else:
            self._states = self._now(whole=True)

    def end_batch(self) -> None:
        """A batch was read."""
        if self.is_of_a_batch:
            self._others.after()

    def go_back_to(self, states: dict[str, Any]) -> None:
        """Draw from ``states`` on, which ``noted`` gave."""
        self._states = states
        self._set(states)

    @property
    def noted(self) -> dict[str, Any]:
        """What was taken last."""
        return self._states

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Leave all states as they were before the block."""
        before = self._now(whole=True)
        try:
            yield
        finally:
            self._set(before)

    def _now(self, *, whole: bool) -> dict[str, Any]:
        states = {"torch": torch.get_rng_state(), "generators": [g.get_state() for g in self._generators]}
        return states | other_states() if whole else states

    def _set(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["torch"])
        for generator, state in zip(self._generators, states["generators"]):
            generator.set_state(state)
        set_other_states(states)


@communicating
def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Give every rank the random state of rank zero, for each of ``rng_types``.

    Args:
        rng_types: ``torch`` (the CPU's), ``generator``, or the type of an accelerator (``cuda``, ``xpu``, ...).
        generator: for ``generator``.

    Collective: every rank.

    Raises:
        UsageError: an unknown type, an accelerator that is not there, or ``generator`` without one.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the random state of rank zero, for one type. Collective. See ``synchronize_rng_states``."""
    kind = str(getattr(rng_type, "value", rng_type))
    if kind == "torch":
        torch.set_rng_state(broadcast(torch.get_rng_state()))
    elif kind == "generator":
        if generator is None:
            raise UsageError("rng_types holds 'generator', and there is no generator", do="give generator=")
        generator.set_state(broadcast(generator.get_state()))
    else:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type != kind:
            here = "torch, generator" + (f", {accelerator.type}" if accelerator is not None else "")
            raise UsageError(
                f"rng_types={kind!r} is not one of those that this machine has: {here}",
                where="rng_types",
                do=f"give some of {here}",
            )
        module: Any = torch.get_device_module(accelerator)
        module.set_rng_state(broadcast(module.get_rng_state()))
