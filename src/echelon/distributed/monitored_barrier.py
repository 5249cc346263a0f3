"""Before an operation that needs every rank: the ranks meet in the store, and one that is elsewhere is an error, no hang."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from echelon.base.errors import DesyncError, RankTimeoutError
from echelon.base.logging import get_logger
from echelon.distributed.responder import all_groups, begun_collectives, desk_of
from echelon.distributed.stores import common_store, store_of
from echelon.distributed.structure_check import ranks_of
from echelon.status.call_site import here
from echelon.status.notes import waiting

__all__ = ["monitored_barrier"]

_logger = get_logger(__name__)
PATIENCE = timedelta(seconds=0.5)
"""So long nobody asks where the others are."""
_REMINDER = timedelta(seconds=30)
_LOOK_EVERY_S = 0.2
_LONGEST_NAP_S = 0.05
_NAP_A_RANK_S = 0.0005  # of many ranks, so that the store serves 2000 of them a second
_TOLD_WITHIN_S = 0.5
_NUM_LISTED = 8
_EVERY_RANK = "on every rank, in the same order: outside of `if accelerator.is_main_process:` and the like"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Post:
    """What a rank leaves in the store when it comes to a meeting."""

    turn: int
    operation: str
    advice: str
    place: str


def monitored_barrier(
    operation: str,
    *,
    advice: str = "",
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    patience: timedelta = PATIENCE,
    reminder: timedelta = _REMINDER,
) -> None:
    """Wait until every rank is at ``operation``; go on together, or raise when one of them never will be.

    A rank that is late is waited for, however long: nothing that a clock says is an error (but ``timeout``). What is: a
    rank at another operation that needs all; one that has begun a collective of torch that this one has not (it is
    further on in the program); one that has ended. The ranks tell it by their ``Watcher``; of one without, only the
    first is known.

    Args:
        operation: its name in errors, equal on all ranks.
        advice: goes into the error; a sentence on how the operation is used.
        group: None: all ranks.
        timeout: the longest wait; None: without end.
        patience: how long to wait before asking where the others are.
        reminder: after this time the first rank that waits logs a warning.

    Collective: every rank of ``group``. It goes through the group's store, not through its backend, so that nothing is
    begun when it raises; four messages to the store.

    Raises:
        DesyncError: a rank will not come; the user's line on each rank is in the message.
        RankTimeoutError: the time is over; the missing ranks are in the message.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    pg = group if group is not None else dist.group.WORLD
    assert pg is not None
    with waiting(operation):
        _Meeting(pg, operation, advice).attend(timeout=timeout, patience=patience, reminder=reminder)


class _Meeting:
    """One rank's part in one meeting.

    Keys: ``turn/R`` how many meetings rank R has come to; ``post/R`` the last; ``arrived/T/operation`` counts who is at
    the T-th; ``open/T`` all are; ``failed/T`` somebody has found that it cannot be.
    """

    def __init__(self, group: dist.ProcessGroup, operation: str, advice: str) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._store = dist.PrefixStore("echelon/meeting", store_of(group))
        self._desk = desk_of(common_store(world))
        self._rank = dist.get_rank()
        self._ranks = ranks_of(group)
        self._operation = operation
        self._place = str(here())
        self._turn = self._store.add(f"turn/{self._rank}", 1)
        self._post = _Post(turn=self._turn, operation=operation, advice=advice, place=self._place)

    def attend(self, *, timeout: timedelta | None, patience: timedelta, reminder: timedelta) -> None:
        """See ``meet``."""
        store, turn, begun = self._store, self._turn, time.monotonic()
        store.set(f"post/{self._rank}", json.dumps(asdict(self._post)))
        arrived = store.add(self._arrived, 1)
        if arrived == len(self._ranks):
            store.set(f"open/{turn}", "1")
            store.delete_key(self._arrived)
            store.delete_key(f"open/{turn - 1}")  # every rank has left the meeting before this one
            return
        deadline = math.inf if timeout is None else begun + timeout.total_seconds()
        look_at = min(begun + patience.total_seconds(), deadline) if arrived > 0 else begun
        remind_at = begun + reminder.total_seconds()
        longest_nap = max(_LONGEST_NAP_S, _NAP_A_RANK_S * len(self._ranks))
        # Not store.wait: it cannot be interrupted, and TCPStore prints two lines at the end of each wait.
        while not store.check([f"open/{turn}"]):
            now = time.monotonic()
            if now < look_at:
                time.sleep(min(longest_nap, max(0.0005, (now - begun) / 10), look_at - now))
                continue
            late = self._look()
            if late and now >= deadline:
                raise self._too_late(sorted(late), timeout)
            if late and now >= remind_at:
                remind_at = math.inf
                self._remind(late, now - begun)
            look_at = min(time.monotonic() + _LOOK_EVERY_S, deadline)

    @property
    def _arrived(self) -> str:
        return f"arrived/{self._turn}/{self._operation}"

    def _look(self) -> dict[int, str]:
        """Return who is not here yet, and where; raise if one will not come, as this rank or another finds.

        What a rank has begun is read before what it has posted: when the post is still an older one, the rank had begun
        it before this meeting. The other way round, a rank that comes while we look would seem to have run past.
        """
        failed = f"failed/{self._turn}"
        if self._store.check([failed]):
            raise DesyncError(**json.loads(self._store.get(failed)))
        late: dict[int, str] = {}
        elsewhere: dict[int, str] = {}
        unaware: list[int] = []
        advice = [self._post.advice]
        for rank in self._ranks:
            if rank == self._rank:
                continue
            ended = json.loads(self._read(f"ended/{rank}") or "null")
            answer = json.loads(self._read(f"place/{rank}") or "{}")
            post = self._post_of(rank)
            if post is not None and post.turn == self._turn and post.operation != self._operation:
                elsewhere[rank] = f"{post.operation} at {post.place}"
                advice.append(post.advice)
            elif post is None or post.turn < self._turn:
                place = answer.get("place")
                late[rank] = f"at {place}" if place else "at a place that it does not tell"
                if ended is not None:
                    elsewhere[rank] = f"has ended ({ended['reason']})"
                    if ended["failed"]:
                        advice.append(f"First mend the error of rank {rank}.")
                elif place and self._is_ahead(answer["begun"]):
                    elsewhere[rank] = f"in another collective at {place}"
                    unaware.append(rank)
                else:
                    self._desk.set(f"ask/{rank}", "")
        if elsewhere:
            raise self._refuse(elsewhere, advice, unaware)
        return late

    def _read(self, key: str) -> str | None:
        return self._desk.get(key).decode() if self._desk.check([key]) else None

    def _post_of(self, rank: int) -> _Post | None:
        key = f"post/{rank}"
        return _Post(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _is_ahead(self, begun: Mapping[str, int]) -> bool:
        """Has a rank begun a collective that this one, which begins none before all are here, has not?"""
        groups = all_groups()
        own = begun_collectives({key: groups[key] for key in begun if key in groups})
        return any(begun[key] > number for key, number in own.items())

    def _refuse(self, elsewhere: Mapping[int, str], advice: Sequence[str], unaware: Sequence[int]) -> DesyncError:
        """Tell the other ranks, and return the error."""
        found = {self._rank: f"{self._operation} at {self._place}", **elsewhere}
        listing = "".join(f"\n    rank {rank}: {text}" for rank, text in sorted(found.items())[:_NUM_LISTED])
        if len(found) > _NUM_LISTED:
            listing += f"\n    and {len(found) - _NUM_LISTED} more"
        what = f"{self._operation} needs every rank, and not all come to it{listing}"
        do = " ".join([f"call it {_EVERY_RANK}.", *filter(None, dict.fromkeys(advice))])
        self._store.set(f"failed/{self._turn}", json.dumps({"what": what, "do": do}))
        self._store.add(self._arrived, -2 * len(self._ranks))  # who comes now looks for the above
        for rank in unaware:
            self._desk.set(
                f"ask/{rank}", f"rank {rank} is in a collective that rank {self._rank} will not join: {what}"
            )
        limit = time.monotonic() + _TOLD_WITHIN_S  # they must read it before this process, or the job, ends
        while time.monotonic() < limit and any(self._desk.check([f"ask/{rank}"]) for rank in unaware):
            time.sleep(0.02)
        return DesyncError(what, do=do)

    def _too_late(self, missing: Sequence[int], timeout: timedelta | None) -> RankTimeoutError:
        assert timeout is not None
        names = f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))}"
        return RankTimeoutError(
            f"{self._operation}: {names} did not arrive within {timeout.total_seconds():g} s",
            do="look at what these ranks do: they wait elsewhere, are slower than the timeout, or have ended",
        )

    def _remind(self, late: Mapping[int, str], waited_s: float) -> None:
        if self._rank == min(set(self._ranks) - set(late)):
            _logger.warning(
                "%s at %s has waited %.0f s for %s. It goes on when they come.",
                self._operation,
                self._place,
                waited_s,
                "; ".join(f"rank {rank} ({place})" for rank, place in late.items()),
                all_ranks=True,
            )
