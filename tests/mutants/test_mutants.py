"""``echelon verify`` finds planted faults, at the right stage and tensor, and reports nothing where there is no fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.verify.command.layouts import Layout
from tests.harness import run_on_ranks
from tests.mutants.catalogue import MUTANTS
from tests.mutants.clean_runs import clean_run
from tests.mutants.effects import first_effect, matches
from tests.mutants.mutant import CUT_TEXTS, REDUCED_WHEN_CLIPPED, SCRIPTS, Mutant, correct_text, mutated_text
from tests.mutants.rank_runs import Program, watch_program
from tests.mutants.runner import WarmRecorder, outcome_of, verify_text
from tests.mutants.table import NOT_FOUND, NOT_LOCALIZED, recorded_cause

OFTEN = ("optimizer step inside no_sync",)
SOAK_CLEAN_RUNS = 500


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> WarmRecorder:
    return WarmRecorder(tmp_path_factory.mktemp("recorded"))


def test_the_catalogue_fits_its_scripts() -> None:
    assert len(MUTANTS) >= 80
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        compile(mutated_text(mutant), mutant.name, "exec")
        compile(correct_text(mutant), mutant.name, "exec")
        assert mutant.fault or mutated_text(mutant) != correct_text(mutant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=() if m.name in OFTEN else pytest.mark.soak, id=m.name) for m in MUTANTS]
)
def test_a_fault_is_found(mutant: Mutant, recorder: WarmRecorder) -> None:
    outcome = outcome_of(mutant, recorder)
    assert outcome.is_found == (mutant.name not in NOT_FOUND), outcome
    assert outcome.is_localized == (mutant.name not in (*NOT_FOUND, *NOT_LOCALIZED)), outcome
    assert outcome.cause == recorded_cause(mutant)


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=() if m.name in OFTEN[:1] else pytest.mark.soak, id=m.name) for m in MUTANTS if m.has_probe],
)
def test_a_fault_has_its_effect(mutant: Mutant) -> None:
    update, names = first_effect(mutant)
    assert matches(mutant, update, names), (update, names)


@pytest.mark.slow
def test_texts_that_a_batch_cuts_are_recognized(recorder: WarmRecorder) -> None:
    """``padded[:, :-1]`` in the collate function: what is left of a text depends on the other texts of its batch."""
    text = (SCRIPTS / "language_model.py").read_text(encoding="utf-8")
    for old, new in CUT_TEXTS:
        assert old in text
        text = text.replace(old, new)
    result = verify_text(text, Layout(num_processes=2), recorder, steps=4)
    assert result.outcome == "same", result.verdict


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.soak)])
def test_gradients_that_are_reduced_when_they_are_clipped(engine: str, recorder: WarmRecorder) -> None:
    text = (SCRIPTS / "accelerated.py").read_text(encoding="utf-8")
    ((old, new),) = REDUCED_WHEN_CLIPPED
    result = verify_text(text.replace(old, new), Layout(num_processes=2, engine=engine), recorder, steps=3)
    assert old in text
    assert result.outcome == "same", result.verdict


@pytest.mark.parametrize("script", ["raw_ddp", pytest.param("stream", marks=pytest.mark.soak)])
def test_a_script_is_a_plain_loop(script: str, tmp_path: Path) -> None:
    """On one process, where it is a plain PyTorch loop, with the batch of both ranks. Tolerance: float32 sums in another order."""
    text = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8").replace("Dropout(0.1)", "Dropout(0.0)")
    size = {
        "raw_ddp": ("BATCH_SIZE, ACCUMULATION, MAX_NORM = 3, 4,", "= 3, 8,"),
        "stream": ("BATCH_SIZE = 3, 3", "= 3, 6"),
    }
    old, new = size[script]
    assert old in text
    both, one = tmp_path / "both.py", tmp_path / "one.py"
    both.write_text(text, encoding="utf-8")
    one.write_text(text.replace(old, old.partition(" = ")[0] + " " + new), encoding="utf-8")
    distributed = run_on_ranks(watch_program, Program(path=both), world_size=2, init_group=False)
    (plain,) = run_on_ranks(watch_program, Program(path=one), world_size=1, init_group=False)
    for states in distributed:
        assert len(states) == len(plain) > 5
        for ours, theirs in zip(states, plain, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "script", ["language_model", *(pytest.param(s, marks=pytest.mark.soak) for s in ("accelerated", "resume_loop"))]
)
def test_no_alarm(script: str, recorder: WarmRecorder) -> None:
    recorder.fault = ""
    resume = {"accelerated": (4, 4), "resume_loop": (6, 6)}.get(script)
    text = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8")
    result = verify_text(text, Layout(num_processes=2), recorder, resume=resume)
    assert result.outcome == "same", result


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SOAK_CLEAN_RUNS, 50))
def test_no_alarm_in_random_runs(first: int, recorder: WarmRecorder) -> None:
    runs = [clean_run(seed) for seed in range(first, first + 50)]
    assert [alarm for run in runs if (alarm := run.alarm(recorder))] == []
