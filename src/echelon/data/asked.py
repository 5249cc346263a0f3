"""Catches a loop that divides the result of one rank by the length of all data."""

from __future__ import annotations

from echelon.base.warnings import UserLine, user_line, warn
from echelon.distributed.collective_count import num_collectives

__all__ = ["Asked"]


class Asked:
    """Who asked for ``loader.dataset``, which all ranks share, and was a result shared after the evaluation beside it?

    Ranks that exchange nothing between the first batch of an evaluation and the next pass, barrier or checkpoint have
    results of their own parts. Any collective of torch.distributed counts, the user's as well.
    """

    __slots__ = ("_line", "_since")

    def __init__(self) -> None:
        self._line: UserLine | None = None
        self._since: int | None = None

    def note_question(self) -> None:
        """The user asks for the dataset."""
        self._line = user_line()

    def note_pass(self, since: int | None) -> None:
        """An evaluation was read to its end; ``since`` is ``num_collectives()`` at its first batch."""
        self._since = since

    def judge(self) -> None:
        """Warn when an evaluation ended, its length was asked for, and nothing has been shared since; forget both."""
        line, since = self._line, self._since
        if since is None:
            return
        self._line = self._since = None
        if line is not None and num_collectives() == since:
            warn(
                "an evaluation was read by several processes, each its own part, loader.dataset (all samples) was asked "
                "for here, and nothing was gathered or reduced: a sum divided by len(loader.dataset) is the result of one "
                "process over the data of all. Use accelerator.reduce(total), or gather_for_metrics(...) in the loop",
                at=line,
            )
