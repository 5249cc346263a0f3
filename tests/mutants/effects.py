"""Proves that a fault has the effect that the catalogue states, without the recorder.

The script with the fault and the script without it run on the same number of ranks; ``probe`` shows their weights, buffers and rates
after each update. ``test_mutants`` compares the scripts without faults with plain loops.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.harness import run_on_ranks
from tests.mutants.mutant import Mutant, correct_text, mutated_text
from tests.mutants.rank_runs import Program, States, watch_program


def first_effect(mutant: Mutant) -> tuple[int | None, list[str]]:
    """Return the first update in which a value differs (-1: before the first; None: no effect), and the names of the values."""
    right = _right_states(correct_text(mutant), mutant.world_size, mutant.engine, mutant.resume)
    wrong = _states(mutated_text(mutant), mutant)
    begin = mutant.resume[1] if mutant.resume else 0
    found: dict[int, set[str]] = {}
    for i in range(max(len(states) for states in (*right, *wrong))):
        for one, other in zip(right, wrong, strict=True):
            for name in _differing(one, other, i):
                # The rate and the loss scale after an update are those of the next one.
                found.setdefault(begin + i - (name not in ("lr", "scale")), set()).add(name)
    first = min(found, default=None)
    return first, [] if first is None else sorted(found[first])


def matches(mutant: Mutant, update: int | None, names: list[str]) -> bool:
    """Return whether an effect is the one that the catalogue states."""
    return update == mutant.update and any(fnmatchcase(name, mutant.effect) for name in names)


@cache
def _right_states(text: str, world_size: int, engine: str | None, resume: tuple[int, int] | None) -> list[States]:
    return _states(
        text,
        Mutant(name="", script="", world_size=world_size, engine=engine, resume=resume, update=0, stages=()),
    )


def _states(text: str, mutant: Mutant) -> list[States]:
    with TemporaryDirectory() as folder:
        path, saved = Path(folder) / "script.py", Path(folder) / "saved"
        path.write_text(text, encoding="utf-8")
        plain = Program(path=path, engine=mutant.engine, fault=mutant.fault)
        if mutant.resume is None:
            return _run(plain, mutant.world_size)
        after = ("--after", str(mutant.resume[0]))
        _run(replace(plain, arguments=("--save", str(saved), *after)), mutant.world_size)
        return _run(replace(plain, arguments=("--resume", str(saved), *after)), mutant.world_size)


def _run(program: Program, world_size: int) -> list[States]:
    return run_on_ranks(watch_program, program, world_size=world_size, init_group=False, timeout=20)


def _differing(one: States, other: States, i: int) -> set[str]:
    if i >= len(one) or i >= len(other):
        return {"number of updates"}
    first, second = one[i], other[i]
    names = {name for name in first.keys() & second.keys() if not _equal(first[name], second[name])}
    return names | (first.keys() ^ second.keys())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Two runs of one script on equal layouts are equal to the last bit, so any greater difference is an effect.
    return one.shape == other.shape and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
