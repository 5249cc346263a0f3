"""A barrier over the group's store that raises an error instead of hanging if a rank will never arrive."""

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
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.distributed.alone import is_alone, is_awaited
from echelon.distributed.peer_responder import count_collectives, groups_of_process, responder_store
from echelon.distributed.small_messages import ranks_of
from echelon.distributed.stores import common_store, control_store, store_of
from echelon.status.call_site import current_call_site
from echelon.status.notes import waiting
from echelon.world.group import DEFAULT_TIMEOUT

_logger = get_logger(__name__)
PATIENCE = timedelta(seconds=0.5)
"""How long to wait before asking the other ranks for their positions."""
_REMINDER = timedelta(seconds=30)
_CHECK_EVERY_S = 0.2
_LONGEST_SLEEP_S = 0.05
_SLEEP_PER_RANK_S = 0.0005  # limits the ranks together to 2000 requests per second
_NOTIFY_WITHIN_S = 0.5
_NUM_LISTED = 8
_EVERY_RANK = N_(
    "call it on every rank, in the same order, outside `if accelerator.is_main_process:` and similar conditions{end}"
)
_UNTIL_GONE_ON = N_(
    "they arrive, come to another operation that needs all ranks, or end. If they wait for this rank in another way (recv(), a file), "
    "call it on every rank"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """The message that a rank writes to the store when it reaches the barrier."""

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
    """Wait until every rank has reached ``operation``; raise if a rank never will.

    Without ``timeout``, it waits indefinitely for a late rank. It raises an error if a rank is at another operation that
    needs all ranks, has passed this call (it has started a torch collective that this rank has not), or has exited. The last
    two are detected only on ranks that have a ``Watcher``.

    Args:
        operation: name of the operation in error messages; must be the same on all ranks.
        advice: a sentence for error messages on how to use the operation.
        group: the process group (default: all ranks).
        patience: how long to wait before asking the other ranks for their positions.
        reminder: how long to wait before the lowest waiting rank logs a warning.

    Collective: call on every rank of ``group``. It sends four messages through the group's store and does not use the
    backend, so it has started no collective when it raises.

    Raises:
        DesyncError: a rank will not arrive (the message gives each rank's line in the user's code), or the others wait for
            this one in ``main_first``.
        RankTimeoutError: some ranks did not arrive in time; the message names them.
    """
    if is_alone(group):
        return
    if group is None and is_awaited():
        raise DesyncError(
            _(
                "{operation} waits for every rank, but the other ranks wait for this one to leave the block of "
                "main_first() or main_process_first()",
                operation=operation,
            ),
            do=_(_EVERY_RANK, end=_(", after the block")),
        )
    # A program that sets a shorter limit means to see the error.
    awaits_all = group is None and (timeout is None or timeout >= DEFAULT_TIMEOUT)
    with waiting(operation, awaits_all=awaits_all):
        _BarrierCall(group, operation, advice).wait(timeout=timeout, patience=patience, reminder=reminder)


def is_passed_by(operation: str) -> bool:
    """Wait until another rank has reached the barrier of ``operation``, or none ever will; return whether none will.

    A rank never will if it is at another operation that needs all ranks or at another line with the same one, waits for
    this rank in ``main_first``, has started a torch collective that this rank has not, or has exited without an error. If this returns False, call ``monitored_barrier(operation)``.

    Args:
        operation: the name that the other ranks pass to ``monitored_barrier``, if they call it.
    """
    if is_alone() or is_awaited():
        return True
    with waiting(operation):
        return _BarrierCall(None, operation, "").is_passed_by(patience=PATIENCE, reminder=_REMINDER)


def note_wait(store: dist.Store, rank: int, *, first: int, outcome: str) -> None:
    """Note that ``rank`` waits in ``main_first`` until rank ``first`` sets the key ``outcome``, for barriers of that rank."""
    wait = {"first": first, "outcome": outcome, "place": str(current_call_site())}
    store.set(f"wait/{rank}", json.dumps(wait))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absent:
    """The ranks that are not at the barrier."""

    late: dict[int, str]
    """Ranks that may still arrive, and their positions."""
    elsewhere: dict[int, str]
    """Ranks that will never arrive, and why."""
    failed: list[int]
    """The ranks of ``elsewhere`` that an error ended."""
    unaware: list[int]
    """The ranks of ``elsewhere`` that wait in a collective for this rank."""
    advice: list[str]


class _BarrierCall:
    """One barrier call on one rank.

    Keys in the store: ``turn/R`` is the number of barriers that rank R has reached, ``arrival/R`` its last arrival, and
    ``arrived/T/operation`` the number of ranks at barrier T. ``open/T`` is set when all ranks have arrived, ``failed/T`` when
    a rank will never arrive.
    """

    def __init__(self, group: dist.ProcessGroup | None, operation: str, advice: str) -> None:
        self._store = dist.PrefixStore("echelon/monitored_barrier", store_of(group))
        self._responder = responder_store(common_store())
        self._control = control_store()
        self._rank = dist.get_rank()
        self._ranks = ranks_of(group)
        self._operation, self._advice = operation, advice
        self._call_site = str(current_call_site())
        self._turn = 0

    def wait(self, *, timeout: timedelta | None, patience: timedelta, reminder: timedelta) -> None:
        """See ``monitored_barrier``."""
        store, started = self._store, time.monotonic()
        turn = self._turn = store.add(f"turn/{self._rank}", 1)
        arrival = _Arrival(turn=turn, operation=self._operation, advice=self._advice, place=self._call_site)
        store.set(f"arrival/{self._rank}", json.dumps(asdict(arrival)))
        arrived = store.add(self._arrived, 1)
        if arrived == len(self._ranks):
            store.set(f"open/{turn}", "1")
            store.delete_key(self._arrived)
            store.delete_key(f"open/{turn - 1}")  # every rank has left the barrier before this one
            return
        deadline = math.inf if timeout is None else started + timeout.total_seconds()
        check_at = min(started + patience.total_seconds(), deadline) if arrived > 0 else started
        remind_at = started + reminder.total_seconds()
        # store.wait cannot be interrupted, and TCPStore prints two lines when it times out.
        while not store.check([f"open/{turn}"]):
            now = time.monotonic()
            if now < check_at:
                self._sleep(now - started, at_most=check_at - now)
                continue
            late = self._find_late_ranks()
            if late and now >= deadline:
                raise self._timeout_error(sorted(late), timeout)
            if late and now >= remind_at:
                remind_at = math.inf
                self._log_reminder(late, now - started)
            check_at = min(time.monotonic() + _CHECK_EVERY_S, deadline)

    def is_passed_by(self, *, patience: timedelta, reminder: timedelta) -> bool:
        """See ``is_passed_by``. This rank has not arrived meanwhile, so that the others are not at odds with it."""
        started = time.monotonic()
        self._turn = self._store.add(f"turn/{self._rank}", 0) + 1
        check_at, remind_at = started + patience.total_seconds(), started + reminder.total_seconds()
        while not (self._store.check([self._arrived]) and self._are_at_this_line()):
            now = time.monotonic()
            if now < check_at:
                self._sleep(now - started, at_most=check_at - now)
                continue
            absent = self._find_absent_ranks(tells_lines_apart=True)
            if not absent.late:
                return not absent.failed and len(absent.elsewhere) == len(self._ranks) - 1
            if now >= remind_at:
                remind_at = math.inf
                self._log_reminder(absent.late, now - started, until=_UNTIL_GONE_ON)
            check_at = time.monotonic() + _CHECK_EVERY_S
        return False

    def _are_at_this_line(self) -> bool:
        """Return whether a rank that has arrived called the operation at the same line as this one.

        One at another line is past this call (``if accelerator.is_main_process: save_state(a)``, then ``save_state(b)``).
        """
        arrivals = (self._arrival_of(rank) for rank in self._ranks if rank != self._rank)
        return any(one is not None and one.turn == self._turn and self._is_this_line(one.place) for one in arrivals)

    def _is_this_line(self, place: str) -> bool:
        # The program may be in another folder on another machine.
        return place.rpartition("/")[2] == self._call_site.rpartition("/")[2]

    def _sleep(self, waited_s: float, *, at_most: float) -> None:
        longest = max(_LONGEST_SLEEP_S, _SLEEP_PER_RANK_S * len(self._ranks))
        time.sleep(min(longest, max(0.0005, waited_s / 10), at_most))

    @property
    def _arrived(self) -> str:
        return f"arrived/{self._turn}/{self._operation}"

    def _find_late_ranks(self) -> dict[int, str]:
        """Return the ranks that have not arrived and their positions; raise if a rank will never arrive."""
        failed = f"failed/{self._turn}"
        if self._store.check([failed]):
            raise DesyncError(**json.loads(self._store.get(failed)))
        absent = self._find_absent_ranks()
        if absent.elsewhere:
            raise self._report_absent_ranks(absent)
        return absent.late

    def _find_absent_ranks(self, *, tells_lines_apart: bool = False) -> _Absent:
        """Return the ranks that have not arrived, and ask those that may still arrive for their positions.

        With ``tells_lines_apart``, a rank that called the same operation at another line has not arrived.

        A rank's collective counts are read before its arrival. In the opposite order, a rank that arrives between the two
        reads would seem to have passed the barrier.
        """
        late: dict[int, str] = {}
        elsewhere: dict[int, str] = {}
        failed: list[int] = []
        unaware: list[int] = []
        advice = [self._advice]
        for rank in self._ranks:
            if rank == self._rank:
                continue
            ended = json.loads(self._read(f"ended/{rank}") or "null")
            answer = json.loads(self._read(f"place/{rank}") or "{}")
            arrival = self._arrival_of(rank)
            at_other_line = tells_lines_apart and arrival is not None and not self._is_this_line(arrival.place)
            if (
                arrival is not None
                and arrival.turn == self._turn
                and (arrival.operation != self._operation or at_other_line)
            ):
                elsewhere[rank] = _("{operation} at {place}", operation=arrival.operation, place=arrival.place)
                advice.append(arrival.advice)
            elif arrival is None or arrival.turn < self._turn:
                place = answer.get("place")
                if ended is not None:
                    elsewhere[rank] = _("has exited ({reason})", reason=ended["reason"])
                    if ended["failed"]:
                        failed.append(rank)
                        advice.append(_("First fix the error of rank {rank}.", rank=rank))
                elif (awaiting := self._place_of_wait(rank)) is not None:
                    elsewhere[rank] = _("waits in main_first() for this rank at {place}", place=awaiting)
                elif place and self._has_run_past(answer["started"]):
                    elsewhere[rank] = _("in another collective at {place}", place=place)
                    unaware.append(rank)
                else:
                    late[rank] = _("at {place}", place=place) if place else _("at an unknown line")
                    self._responder.set(f"ask/{rank}", "")
        return _Absent(late=late, elsewhere=elsewhere, failed=failed, unaware=unaware, advice=advice)

    def _read(self, key: str) -> str | None:
        return self._responder.get(key).decode() if self._responder.check([key]) else None

    def _arrival_of(self, rank: int) -> _Arrival | None:
        key = f"arrival/{rank}"
        return _Arrival(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _place_of_wait(self, rank: int) -> str | None:
        """Return where ``rank`` waits in ``main_first`` for this rank, which has not come there yet."""
        key = f"wait/{rank}"
        wait = json.loads(self._control.get(key)) if self._control.check([key]) else None
        if wait is None or wait["first"] != self._rank or self._control.check([wait["outcome"]]):
            return None
        return str(wait["place"])

    def _has_run_past(self, started: Mapping[str, int]) -> bool:
        """Return whether ``started`` counts a collective that this rank, still at the barrier, has not started."""
        groups = groups_of_process()
        own = count_collectives({key: groups[key] for key in started if key in groups})
        return any(started[key] > number for key, number in own.items())

    def _report_absent_ranks(self, absent: _Absent) -> DesyncError:
        own = _("{operation} at {place}", operation=self._operation, place=self._call_site)
        found = {self._rank: own, **absent.elsewhere}
        listing = "".join(f"\n    rank {rank}: {text}" for rank, text in sorted(found.items())[:_NUM_LISTED])
        if len(found) > _NUM_LISTED:
            listing += _("\n    and {number} more", number=len(found) - _NUM_LISTED)
        what = _(
            "{operation} must be called on every rank, but some ranks did not call it{listing}",
            operation=self._operation,
            listing=listing,
        )
        do = " ".join([_(_EVERY_RANK, end=_(".")), *filter(None, dict.fromkeys(absent.advice))])
        self._store.set(f"failed/{self._turn}", json.dumps({"what": what, "do": do}))
        self._store.add(self._arrived, -2 * len(self._ranks))  # ranks that arrive from now on check failed/T
        for rank in absent.unaware:
            self._responder.set(
                f"ask/{rank}",
                _(
                    "rank {rank} is in a collective that rank {own} will not join: {what}",
                    rank=rank,
                    own=self._rank,
                    what=what,
                ),
            )
        limit = time.monotonic() + _NOTIFY_WITHIN_S  # they must read the message before this process or the job exits
        while time.monotonic() < limit and any(self._responder.check([f"ask/{rank}"]) for rank in absent.unaware):
            time.sleep(0.02)
        return DesyncError(what, do=do)

    def _timeout_error(self, missing: Sequence[int], timeout: timedelta | None) -> RankTimeoutError:
        assert timeout is not None
        ranks = ", ".join(map(str, missing))
        return RankTimeoutError(
            _(
                "{operation}: {ranks} did not arrive within {timeout:g} s",
                operation=self._operation,
                ranks=_("ranks {ranks}", ranks=ranks) if len(missing) > 1 else _("rank {rank}", rank=ranks),
                timeout=timeout.total_seconds(),
            ),
            do=_("check these ranks' logs: the ranks may hang elsewhere, need more time, or have exited"),
        )

    def _log_reminder(self, late: Mapping[int, str], waited_s: float, *, until: str = N_("they arrive")) -> None:
        if self._rank == min(set(self._ranks) - set(late)):
            _logger.warning(
                N_("%s at %s has waited %.0f s for %s and continues when %s"),
                self._operation,
                self._call_site,
                waited_s,
                _("; ").join(f"rank {rank} ({place})" for rank, place in late.items()),
                _(until),
                all_ranks=True,
            )
