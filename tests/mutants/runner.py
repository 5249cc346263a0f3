"""Runs ``echelon verify`` on a mutant, with the warm workers of ``run_on_ranks`` in place of ``echelon launch``."""

from __future__ import annotations

import os
import random
import shutil
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from echelon.verify.command.layouts import Layout
from echelon.verify.command.run_layouts import LayoutRun, RunFailure, RunRequest
from echelon.verify.command.verification import LayoutResult, VerifyPlan, verify
from echelon.verify.parts import record_everything
from echelon.verify.recording import recording
from echelon.verify.trace import OptimizerStep, read_trace
from tests.harness import RanksFailed, RanksHung, run_on_ranks
from tests.mutants.mutant import Mutant, correct_text, mutated_text
from tests.mutants.rank_runs import Program, run_program

STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What ``echelon verify`` said of a mutant."""

    mutant: Mutant
    result: str
    update: int | None = None
    stage: str = ""
    tensors: tuple[str, ...] = ()
    cause: str = ""
    line: str = ""
    what: str = ""
    reason: str = ""
    has_right_tensor: bool = False

    @property
    def is_found(self) -> bool:
        """Whether it was found within one step of its first effect."""
        return self.is_found_late and self.update is not None and abs(self.update - self.mutant.update) <= 1

    @property
    def is_found_late(self) -> bool:
        """Whether it was found within ten steps."""
        return self.result == "different"

    @property
    def is_localized(self) -> bool:
        """Whether the stage and the tensor are right, too."""
        return self.is_found and self.stage in self.mutant.stages and self.has_right_tensor


class WarmRecorder:
    """Records runs as ``LayoutRunner`` does. Runs on one process that were recorded before are copied.

    Args:
        folder: where the recorded runs are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fault = ""
        """Name of a fault in a library, which is planted on layouts with several processes."""

    def record(self, request: RunRequest) -> LayoutRun:
        """Run the script, and return how it ended."""
        began = time.monotonic()
        is_reference = request.layout.num_processes == 1
        kept = self._folder / self._key(request)
        failure = None
        if is_reference and kept.exists():
            shutil.copytree(kept, request.folder)
        else:
            failure = self._run(request)
            if is_reference and failure is None:
                shutil.copytree(request.folder, kept)
        steps = [event for event in _rank_zero(request.folder) if isinstance(event, OptimizerStep)]
        count = len({event.update for event in steps})
        if failure is None and not count:
            failure = RunFailure(what="the script ended without an optimizer step")
        return LayoutRun(request=request, num_updates=count, seconds=time.monotonic() - began, failure=failure)

    def _run(self, request: RunRequest) -> RunFailure | None:
        program = Program(
            path=Path(request.script),
            arguments=request.arguments,
            engine=request.layout.engine,
            fault=self.fault if request.layout.num_processes > 1 else "",
        )
        try:
            run_on_ranks(
                _record, program, request, world_size=request.layout.num_processes, init_group=False, timeout=10
            )
        except (RanksFailed, RanksHung) as error:
            return RunFailure(what=f"{type(error).__name__}: {error}")
        return None

    def _key(self, request: RunRequest) -> str:
        text = Path(request.script).read_text(encoding="utf-8")
        return sha256(repr((text, request.arguments, request.layout, request.run)).encode()).hexdigest()


def outcome_of(mutant: Mutant, recorder: WarmRecorder) -> Outcome:
    """Verify a mutant."""
    reference = correct_text(mutant) if mutant.against == "correct" else None
    recorder.fault = mutant.fault
    layout = Layout(num_processes=mutant.world_size, engine=mutant.engine)
    result = verify_text(mutated_text(mutant), layout, recorder, against=reference, resume=mutant.resume)
    verdict = result.verdict
    if verdict is None:
        failure = result.failure
        reason = "" if failure is None else f"{failure.what} {' '.join(failure.details[-3:])}"
        return Outcome(mutant=mutant, result=result.outcome, reason=reason)
    finding = verdict.finding
    if finding is None:
        return Outcome(mutant=mutant, result=verdict.result, reason=verdict.reason)
    return Outcome(
        mutant=mutant,
        result=verdict.result,
        update=finding.update,
        stage=finding.stage,
        tensors=tuple(finding.tensors),
        cause=finding.cause,
        line=finding.line,
        what=finding.what,
        has_right_tensor=mutant.names_tensor(finding),
    )


def verify_text(
    text: str,
    layout: Layout,
    recorder: WarmRecorder,
    *,
    against: str | None = None,
    resume: tuple[int, int] | None = None,
    steps: int = STEPS,
) -> LayoutResult:
    """Verify a script on one layout.

    Args:
        text: the script.
        layout: compared with one process.
        recorder: records the runs.
        against: the script that runs on one process; None: the same.
        resume: save after the first number of updates, and resume.
        steps: number of updates; with ``resume`` four more than are saved.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        script, other = folder / "script.py", folder / "reference.py"
        script.write_text(text, encoding="utf-8")
        if against is not None:
            other.write_text(against, encoding="utf-8")
        save, resumed = _arguments_of(folder, resume)
        plan = VerifyPlan(
            script=str(script),
            arguments=save,
            layouts=(layout,),
            steps=steps if resume is None else resume[0] + 4,
            folder=folder / "traces",
            against=None if against is None else str(other),
            resume_after=None if resume is None else resume[0],
            resume_arguments=resumed,
        )
        verification = verify(plan, recorder.record)
        if verification.reference_failure is not None:
            run = verification.reference_failure
            return LayoutResult(layout=layout, outcome="failed", num_updates=0, seconds=0.0, failure=run.failure)
        return verification.layouts[0]


def _arguments_of(folder: Path, resume: tuple[int, int] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if resume is None:
        return (), ()
    saved, after = str(folder / "saved"), ("--after", str(resume[0]))
    return ("--save", saved, *after), ("--resume", saved, *after)


def _record(program: Program, request: RunRequest) -> None:
    rank = int(os.environ["RANK"])
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    request.folder.mkdir(parents=True, exist_ok=True)
    with recording(request.folder, request.run, rank=rank) as one:
        record_everything(one)
        run_program(program)


def _rank_zero(folder: Path) -> list[object]:
    ranks = read_trace(folder).ranks
    return list(ranks[0]) if ranks else []
