"""Progress: a run's counters, which are saved in checkpoints, and the progress bars of long operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from echelon.base.errors import UsageError
from echelon.base.rank import known_rank

BarOpener: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar, given a label and the total number of bytes. Yields a function to call with the number of bytes
processed since its last call."""

_DELAY_S = 0.5
"""Operations that end sooner show no bar."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """A run's progress counters, which start at zero."""

    epoch: int = 0
    """Index of the current pass over the training data, starting at 0."""
    step: int = 0
    """Number of optimizer steps, excluding steps skipped by loss scaling."""
    micro_step: int = 0
    """Number of micro-steps started in the current update (exact modes). Saved as 0, because a partial update is replayed."""
    samples_seen: int = 0
    """Number of samples in all updates so far, across all ranks (exact modes)."""
    tokens_seen: float = 0.0
    """Sum of ``num_items=`` over all updates so far, across all ranks."""
    position: int = 0
    """Number of samples of the current epoch that complete updates have used; a resumed pass continues after them (exact
    modes)."""

    def to_json(self) -> dict[str, Any]:
        """Return the counters as a dict."""
        return asdict(self)

    def load_json(self, counters: dict[str, Any]) -> None:
        """Load counters returned by ``to_json``.

        Raises:
            UsageError: the counter names differ. This object is left unchanged.
        """
        names = {field.name for field in fields(self)}
        if set(counters) != names:
            raise UsageError(
                f"the saved progress has counters {sorted(counters)}, but this version of echelon has {sorted(names)}",
                do="load the checkpoint with the version of echelon that saved it",
            )
        for name, value in counters.items():
            setattr(self, name, value)


def shows_bars() -> bool:
    """Return whether stderr is a terminal or the program runs in a notebook, whose stderr is not a terminal."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


@contextmanager
def progress_bar(label: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of an operation on ``num_bytes`` bytes, on rank zero, if it takes longer than half a second.

    The bar is removed when the operation ends.
    """
    if not shows_bars() or known_rank():
        yield _ignore
        return
    from tqdm.auto import tqdm  # noqa: PLC0415 - needed only for a bar

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        monitor_interval = 0  # no thread: a program may fork its loader workers afterwards

    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1000}
    with Bar(total=num_bytes, desc=label, leave=False, delay=_DELAY_S, dynamic_ncols=True, **options) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def no_bar(label: str, num_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing, for operations in a thread, beside the program's own output."""
    return nullcontext(_ignore)


def _ignore(count: int) -> None:
    pass
