"""Run drawn cases on kept ranks and compare each with its plain loop."""

from __future__ import annotations

import math
import os
import pickle
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.base.errors import EchelonError
from echelon.distributed import process_group
from tests.harness import RanksFailed, RanksHung, run_on_ranks
from tests.programs import loop, native_loop, trainer_loop
from tests.programs.known import excuse_of, is_expected_warning, known_open, refusal_of
from tests.programs.loop import Found
from tests.programs.plain import Expected, run_plainly
from tests.programs.plain_native import run_native_plainly
from tests.programs.plain_trainer import run_trainer_plainly
from tests.programs.program import Case, Layout, Program, simpler

LIMIT_S = 20.0  # of one program; a rank that raised waits as long for the others
CHUNK = 25


@dataclass(frozen=True)
class Start:
    """One start of a program: the whole of it, or one of its two halves around a save."""

    number: int
    """Of the case in its list."""
    kind: str
    """``run``, ``second`` (after the save) or ``twin`` (bitwise: the same on another layout)."""
    program: Program
    layout: Layout
    folder: str | None = None


@dataclass
class Outcome:
    """What one rank has to say of a start."""

    found: Found | None = None
    error: str = ""
    is_ours: bool = False
    """The error is one of echelon's."""
    trace: str = ""
    warned: list[tuple[str, str]] = field(default_factory=list)
    """(class, text)"""
    cpu_s: float = 0.0


@dataclass
class Report:
    """What became of the cases."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Case, str]] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Of the ranks and of the plain loops."""

    def summary(self) -> str:
        """Return what became of how many."""
        lines = [f"{name}: {count}" for name, count in sorted(self.counts.items())]
        return "\n".join([*lines, *(f"CPU seconds of the {name}: {value:.1f}" for name, value in self.cpu_s.items())])

    def __str__(self) -> str:
        lines = [self.summary()]
        for case, why in self.failures:
            lines.append(f"---- seed {case.program.seed}: {why}\n{case!r}\n{case.script()}")
        return "\n".join(lines)


def check_cases(cases: Sequence[Case]) -> Report:
    """Run every case and compare it with its plain loop."""
    report = Report()
    drawn: list[Case] = []
    for case in cases:
        item = known_open(case)
        if item is None:
            drawn.append(case)
        else:
            report.counts[f"left out: item {item} of the known open faults"] += 1
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        first = [
            Start(i, "run", case.program, case.layout, f"{folder}/{i}" if _has_folder(case) else None)
            for i, case in enumerate(drawn)
        ]
        first += [
            Start(i, "twin", case.program, case.other, f"{folder}/{i}-twin" if _has_folder(case) else None)
            for i, case in enumerate(drawn)
            if case.other is not None and case.program.saves is None
        ]
        outcomes = _run(first)
        second = [
            Start(s.number, "second", s.program, drawn[s.number].other or s.layout, s.folder)
            for s in first
            if s.kind == "run" and _has_saved(outcomes[s])
        ]
        outcomes |= _run(second)
    by_case: dict[int, dict[str, list[Outcome] | str]] = {}
    for start, outcome in outcomes.items():
        by_case.setdefault(start.number, {})[start.kind] = outcome
    begun = time.process_time()
    for number, case in enumerate(drawn):
        verdict, why = _judge(case, by_case[number])
        report.counts[verdict] += 1
        if verdict == "FAILED":
            report.failures.append((case, why))
    report.cpu_s["plain loops"] = time.process_time() - begun
    report.cpu_s["ranks"] = sum(one.cpu_s for found in outcomes.values() if not isinstance(found, str) for one in found)
    return report


def require_plain(cases: Sequence[Case]) -> None:
    """Fail unless every case is its plain loop; none of them may be refused."""
    report = check_cases(cases)
    assert report.counts == {"equal": len(cases)}, str(report)


def _has_folder(case: Case) -> bool:
    return case.program.saves is not None or case.program.returns != "no" or case.layout.level == 3


def explain(case: Case) -> str:
    """Run one case and say what came of it."""
    report = check_cases([case])
    return str(report)


def shrink(case: Case, *, limit_s: float = 60.0) -> Case:
    """Return a case with fewer features that fails in the same way."""
    deadline = time.monotonic() + limit_s
    failures = check_cases([case]).failures
    kind = _kind_of(failures[0][1]) if failures else ""
    is_smaller = bool(failures)
    while is_smaller and time.monotonic() < deadline:
        is_smaller = False
        for one in simpler(case):
            failures = check_cases([one]).failures
            if failures and _kind_of(failures[0][1]) == kind:
                case, is_smaller = one, True
                break
    return case


def _kind_of(failure: str) -> str:
    """Return the error of a failure; else what differs: a program with one thing less may fail for want of it."""
    error = re.search(r"\w+(?:Error|Failed|Hung)\b", failure)
    return error.group() if error else re.sub(r"\d+", "", failure).split("[")[0][:40]


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def _run(starts: Iterable[Start]) -> dict[Start, list[Outcome] | str]:
    """Return the outcomes by rank; a text where the ranks did not come to one."""
    outcomes: dict[Start, list[Outcome] | str] = {}
    starts = list(starts)
    # Scripts of level 1 make their process group.
    for world_size, makes_group in sorted({(start.layout.world_size, start.layout.level == 1) for start in starts}):
        left = [s for s in starts if s.layout.world_size == world_size and (s.layout.level == 1) == makes_group]
        while left:
            chunk = left[:CHUNK]
            with tempfile.TemporaryDirectory(prefix="place-") as place:
                broken = ""
                try:
                    run_on_ranks(
                        _serve_native if makes_group else _serve,
                        chunk,
                        place,
                        world_size=world_size,
                        timeout=LIMIT_S * len(chunk) + 60,
                        init_group=not makes_group,
                    )
                except (RanksFailed, RanksHung) as error:
                    broken = f"{type(error).__name__}: {error}"
                by_rank = [_noted(place, rank) for rank in range(world_size)]
                # An error on any rank ends the call, for the group is not to be trusted any more.
                done = min(map(len, by_rank))
                for number in range(done):
                    outcomes[chunk[number]] = [answers[number] for answers in by_rank]
                # The ranks that waited for the one that failed end with it, some of them in time to note that.
                is_noted = done > 0 and any(answers[done - 1].error for answers in by_rank)
                if done < len(chunk) and broken and not is_noted:
                    answers = [noted[done] for noted in by_rank if len(noted) > done]
                    failed = [one for one in answers if one.error]
                    stacks = [_noted_text(place, rank) for rank in range(world_size)]
                    hangs = "\n".join(filter(None, stacks))
                    outcomes[chunk[done]] = hangs or failed or broken
                    done += 1
                elif broken and not is_noted:
                    outcomes[chunk[-1]] = broken  # when the group ended
                assert done
            left = left[done:]
    return outcomes


def _noted(place: str, rank: int) -> list[Outcome]:
    path = Path(place, f"{rank}.outcomes")
    found: list[Outcome] = []
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    found.append(pickle.load(file))
                except EOFError:
                    break
    return found


def _noted_text(place: str, rank: int) -> str:
    path = Path(place, f"{rank}.stack")
    text = path.read_text() if path.exists() else ""
    return f"it hangs; rank {rank} is here\n{text}" if text else ""


def _serve_native(starts: list[Start], place: str) -> None:
    with process_group():
        _serve(starts, place)


def _serve(starts: list[Start], place: str) -> None:
    """Run the programs, and note each one's outcome on disk: a call that breaks has no result."""
    rank = dist.get_rank()
    if any("deepspeed" in (start.layout.engine or "") for start in starts):
        import_module("deepspeed")  # takes seconds, which are no program's
    with Path(place, f"{rank}.outcomes").open("wb") as notes, Path(place, f"{rank}.stack").open("w") as stack:
        for number, start in enumerate(starts):
            # DeepSpeed imports more of itself with the first models.
            limit_s = LIMIT_S if "deepspeed" not in (start.layout.engine or "") else 4 * LIMIT_S
            watchdog = threading.Timer(limit_s, _give_up, (stack,))
            watchdog.daemon = True
            watchdog.start()
            outcome = _outcome(start)
            watchdog.cancel()
            pickle.dump(outcome, notes)
            notes.flush()
            if not _meet(number, failed=bool(outcome.error)):
                raise RuntimeError(f"rank {rank} has ended the program of seed {start.program.seed}, others have not")
            if outcome.error:
                break


def _give_up(stack: Any) -> None:
    for thread, frame in sys._current_frames().items():
        if thread == threading.main_thread().ident:
            stack.write("".join(traceback.format_stack(frame)[-12:]))
    stack.flush()
    os._exit(3)


def _outcome(start: Start) -> Outcome:
    outcome, begun = Outcome(), time.process_time()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            outcome.found = _train(start)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what this program came to
            outcome.error = f"{type(error).__name__}: {error}"
            outcome.is_ours = isinstance(error, EchelonError)
            outcome.trace = "".join(traceback.format_exception(error))
    outcome.cpu_s = time.process_time() - begun
    outcome.warned = list({(one.category.__name__, str(one.message)) for one in warned})
    return outcome


def _train(start: Start) -> Found:
    folder, goes_on = None if start.folder is None else Path(start.folder), start.kind == "second"
    if start.layout.level == 3:
        assert folder is not None
        return trainer_loop.train(start.program, start.layout, folder, goes_on=goes_on)
    if start.layout.level == 1:
        return native_loop.train(start.program, start.layout)
    return loop.train(start.program, start.layout, folder, goes_on=goes_on)


def _meet(number: int, *, failed: bool) -> bool:
    """Wait until every rank is done with a program; False: some rank is not, or has come to another end."""
    if dist.get_world_size() == 1:
        return True
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store.set(f"programs/{number}/{rank}", b"1" if failed else b"0")
    limit = timedelta(seconds=LIMIT_S if not failed else 3.0)
    try:
        answers = []
        for other in range(world_size):
            store.wait([f"programs/{number}/{other}"], limit)
            answers.append(store.get(f"programs/{number}/{other}"))
    except RuntimeError:  # torch's DistStoreError: the time is up
        return False
    return len(set(answers)) == 1


def _has_saved(outcomes: list[Outcome] | str) -> bool:
    return not isinstance(outcomes, str) and all(one.found is not None and one.found.has_saved for one in outcomes)


# ---- what is demanded ------------------------------------------------------------------------------------------------


def _judge(case: Case, outcomes: dict[str, list[Outcome] | str]) -> tuple[str, str]:
    """Return a verdict, and why."""
    for kind, found in outcomes.items():
        if isinstance(found, str):
            return "FAILED", f"{kind}: {found}"
        errors = sorted(
            (one for one in found if one.error), key=lambda one: not one.is_ours
        )  # then what follows from it
        if errors:
            layout = case.layout if kind == "run" else case.other or case.layout
            refusal = refusal_of(case.program, layout, errors[0].error) if errors[0].is_ours else None
            if refusal is not None:
                return f"refused by name: {refusal}", ""
            return "FAILED", f"{kind}: {errors[0].error}\n{errors[0].trace}"
        for outcome in found:
            for category, text in outcome.warned:
                if not is_expected_warning(case.program, category, text):
                    return "FAILED", f"{kind}: it warned: {category}: {text}"
    with warnings.catch_warnings():
        # Torch's Adagrad makes sparse tensors, and torch says once a process that it does not check them.
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        expected = {1: run_native_plainly, 2: run_plainly, 3: run_trainer_plainly}[case.layout.level](case)
    texts = [text for found in outcomes.values() for one in found for _, text in one.warned]  # type: ignore[union-attr]
    difference = _difference(case, outcomes, expected)  # type: ignore[arg-type]
    if not difference:
        return "equal", ""
    excuse = excuse_of(case, texts)
    if excuse is not None:
        return f"differs with a warning: {excuse}", ""
    return "FAILED", difference


def _difference(case: Case, outcomes: dict[str, list[Outcome]], expected: Expected) -> str:
    runs = outcomes["second"] if "second" in outcomes else outcomes["run"]
    for rank, outcome in enumerate(runs):
        assert outcome.found is not None
        text = _against_plain(case, outcome.found, expected, is_rest="second" in outcomes)
        if text:
            return f"rank {rank}: {text}"
    if "twin" in outcomes:
        mine, twin = outcomes["run"][0].found, outcomes["twin"][0].found
        assert mine is not None
        assert twin is not None
        for name in ("weights", "losses", "norms", "evaluations"):
            if not _same_bits(getattr(mine, name), getattr(twin, name)):
                return f"bitwise: {name} differ from those on {case.other}: {getattr(mine, name)} {getattr(twin, name)}"
    return ""


def _same_bits(mine: list[Any], other: list[Any]) -> bool:
    if len(mine) != len(other):
        return False
    pairs = ((torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(mine, other))
    return all(torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) for a, b in pairs)


def _against_plain(case: Case, found: Found, expected: Expected, *, is_rest: bool) -> str:
    """Say what differs from the plain loop by more than the order of additions does."""
    program = case.program
    num_steps = len(expected.rates) if expected.num_steps is None else expected.num_steps
    is_counted = (
        program.is_prepared and program.retries != "again"
    )  # progress.step is that of the optimizer with most steps
    if found.num_steps != num_steps and is_counted:
        return f"{found.num_steps} updates, and the plain loop makes {num_steps}"
    # Sums in another order: 1e-12 (docs/parity.md). What divides by the size of a gradient turns its noise into a step.
    tolerance = 1e-12 if program.optimizer in ("sgd", "momentum") else 1e-9 if program.optimizer != "lbfgs" else 1e-8
    absolute = 1e-14 if program.optimizer in ("sgd", "momentum") else 1e-11
    if program.float32:
        # An update adds up fewer than 64 numbers of about one, each of which rounds, and hands its errors on to the next.
        tolerance = absolute = 64 * torch.finfo(torch.float32).eps * (1 + len(expected.rates))
    if program.loaded:  # numbers of about one, which are rounded in each pass and each update
        tolerance = absolute = 4 * torch.finfo(getattr(torch, program.loaded)).eps * (1 + len(expected.rates))
    if program.fp16 and (case.layout.engine or "").startswith("fsdp2"):
        # fully_shard computes in fp16; an update adds up a few numbers of about one times the learning rate, at most 0.3.
        tolerance = absolute = 4 * torch.finfo(torch.float16).eps * (1 + len(expected.rates))
    for number, (mine, wanted) in enumerate(zip(found.weights, expected.weights)):
        if (text := _apart(mine, wanted, tolerance, absolute)) is not None:
            return f"weight {number} {text}"
    for name, mine_, wanted_ in (
        ("norm", found.norms, expected.norms),
        ("learning rate", found.rates, expected.rates),
        ("loss", found.losses if case.layout.parity != "off" or case.layout.level != 2 else [], expected.losses),
    ):
        if not mine_:
            continue
        rest = wanted_[-len(mine_) :] if is_rest else wanted_
        if len(mine_) != len(rest):
            return f"{len(mine_)} entries of {name}, and the plain loop has {len(rest)}"
        numbers = (torch.tensor(each, dtype=torch.float64) for each in (mine_, rest))
        if (text := _apart(*numbers, tolerance, max(absolute, 1e-13))) is not None:
            return f"{name} {text}"
    if len(found.evaluations) > len(expected.evaluations):
        return f"{len(found.evaluations)} evaluations for {len(expected.evaluations)}"
    for mine, indices, wanted in zip(
        reversed(found.evaluations), reversed(found.evaluated), reversed(expected.evaluations)
    ):
        if indices != list(range(len(wanted))):
            return f"an evaluation saw the samples {indices}, and there are {len(wanted)}"
        if (text := _apart(mine, wanted, tolerance, absolute)) is not None:
            return f"predictions of an evaluation {text}"
    if not is_rest and len(found.evaluation_losses) != len(expected.evaluation_losses):
        return f"{len(found.evaluation_losses)} losses of evaluations for {len(expected.evaluation_losses)}"
    for mine_, wanted_ in zip(reversed(found.evaluation_losses), reversed(expected.evaluation_losses)):
        numbers = (torch.tensor(each, dtype=torch.float64) for each in (mine_, wanted_))
        text = None if math.isnan(wanted_) else _apart(*numbers, tolerance, max(absolute, 1e-13))
        if text is not None:
            return f"loss of an evaluation {text}"
    is_read_in_turn = not program.zipped and program.fetches == 1 and program.splits != "counted"
    if not is_rest and is_read_in_turn:  # results are those of one loader
        for epoch, (seen, wanted_seen) in enumerate(zip(found.epochs, expected.epochs)):
            wanted_seen = wanted_seen if case.layout.level == 1 else [*{i for i in wanted_seen if i >= 0}]
            if sorted(seen) != sorted(wanted_seen):
                return f"epoch {epoch} gave the samples {sorted(seen)}, and the plain loop {sorted(wanted_seen)}"
    return ""


def _apart(mine: torch.Tensor, wanted: torch.Tensor, relative: float, absolute: float) -> str | None:
    if mine.shape != wanted.shape:
        return f"has the shape {list(mine.shape)}, and should have {list(wanted.shape)}"
    if torch.allclose(mine.double(), wanted.double(), rtol=relative, atol=absolute, equal_nan=True):
        return None
    gap = float((mine.double() - wanted.double()).abs().max())
    return f"is off by {gap:.3g}: {mine.flatten().tolist()[:6]} for {wanted.flatten().tolist()[:6]}"
