"""Drawn programs on device meshes: each is a plain PyTorch loop in one process, or is refused by name; never another run in silence."""

from __future__ import annotations

import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from echelon.base.errors import EchelonError
from tests.harness import RanksFailed, RanksHung, import_ahead, run_on_ranks
from tests.programs.mesh_loop import train
from tests.programs.mesh_program import Found, MeshProgram, draw_mesh_program, run_plainly, simpler, sizes_of

import_ahead("transformers.models.llama.modeling_llama", "torch.distributed.pipelining")

# Split layers that go on as stages in mid-epoch, experts that go on divided among more ranks, pieces of sequences that are
# computed again; of the soak tests: split layers alone, and stages alone.
ORDINARY = [
    replace(draw_mesh_program(738), saves=1),
    MeshProgram(
        model="experts",
        optimizer="momentum",
        epochs=1,
        saves=1,
        sizes=sizes_of("shard 4 ep 2"),
        other=sizes_of("shard 4 ep 4"),
    ),
    MeshProgram(sizes=sizes_of("cp 2"), checkpoints=True, epochs=1),
]
MORE = [draw_mesh_program(12), draw_mesh_program(43)]
SOAK_CHUNK = 50
SOAK = int(os.environ.get("DRAWN_MESH_PROGRAMS", "400"))
LIMIT_S = 120.0

_Refusal = tuple[str, Callable[[MeshProgram], bool]]
# Text of an error, and the programs that it may be of.
_REFUSALS: list[_Refusal] = [
    ("which cannot be split over tp_size", lambda p: p.size("tp") > p.num_kv_heads),
    ("parity='exact'", lambda p: p.level == 3 and p.parity == "off" and p.size("cp") * p.size("sp") > 1),
    ("is tied between the stages", lambda p: p.tied and p.schedule_of_stages in ("ZBVZeroBubble", "DualPipeV")),
    ("does not work with . micro-batches", lambda p: p.size("pp") > 1),
    ("the checkpoint was saved during an epoch with . process", lambda p: p.saves is not None and p.parity == "off"),
    ("there is no batch to train on", lambda p: p.level == 3 and p.drop_last and p.num_samples < p.batch_size),
]


def check(program: MeshProgram) -> str:
    """Return how the run differs from the plain loop; "": it does not; "refused ...": by an error of echelon that names why."""
    with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
        try:
            runs = run_on_ranks(train, program, f"{folder}/run", world_size=program.world_size, timeout=LIMIT_S)
            is_rest = runs[0].has_saved
            at = program
            if is_rest:
                assert program.other is not None
                at = program.on(program.other)
                runs = run_on_ranks(train, at, f"{folder}/run", goes_on=True, world_size=at.world_size, timeout=LIMIT_S)
        except (RanksFailed, RanksHung) as error:
            errors = list(getattr(error, "errors", {}).values())
            for one in errors:
                if isinstance(one, EchelonError):
                    for text, when in _REFUSALS:
                        meshes = [program] if program.other is None else [program, program.on(program.other)]
                        if re.search(text, str(one)) and any(map(when, meshes)):
                            return f"refused: {text}"
            return f"{type(error).__name__}: {error}"
    return _difference(program, at, runs, is_rest=is_rest)


def _difference(program: MeshProgram, at: MeshProgram, runs: list[Found], *, is_rest: bool) -> str:
    if program.parity == "off" and is_rest and at.num_readers != program.num_readers:
        return ""  # the batch of an update is another one
    expected = run_plainly(program)
    # Sums in another order. AdamW divides by the size of a gradient, and so enlarges the rounding errors of small ones.
    tolerance = 1e-9 if program.optimizer == "adamw" else 1e-11
    names: set[str] = set()
    for rank, found in enumerate(runs):
        for name, weight in found.weights.items():
            plain = "model.embed_tokens.weight" if program.tied and name == "lm_head.weight" else name
            names.add(plain)
            gap = float((weight - expected.weights[plain]).abs().max())
            if not gap < tolerance:
                return f"rank {rank}: {name} is off by {gap:.2g}"
        for what, mine, wanted in (
            ("losses", found.losses, expected.losses),
            ("norms", found.norms, expected.norms),
            ("rates", found.rates, expected.rates),
        ):
            if what == "losses" and (program.parity == "off" or not mine):
                continue
            wanted = wanted[-len(mine) :] if is_rest and mine else [] if is_rest else wanted
            if len(mine) != len(wanted) and not (what == "norms" and program.clipping in ("none", "value")):
                return f"rank {rank}: {len(mine)} {what} for {len(wanted)}"
            if what == "norms" and program.clipping in ("none", "value"):
                continue
            gaps = [abs(a - b) for a, b in zip(mine, wanted)]
            if not max(gaps, default=0.0) < max(tolerance, 1e-12):
                return f"rank {rank}: {what} {mine} for {wanted}"
        evaluated = expected.evaluations[-len(found.evaluations) :] if found.evaluations else []
        if len(found.evaluations) != len(expected.evaluations) and not is_rest:
            return f"rank {rank}: {len(found.evaluations)} evaluations for {len(expected.evaluations)}"
        for own, theirs in zip(found.evaluations, evaluated):
            if program.level == 3 and program.parity == "off":
                continue  # a mean over the batches' means
            gap = float((own - theirs).abs().max())
            if not gap < 10 * tolerance or math.isnan(gap):
                return f"rank {rank}: an evaluation is off by {gap:.2g}"
    if names != expected.weights.keys():
        return f"weights {sorted(expected.weights.keys() ^ names)}"
    return ""


def shrink(program: MeshProgram, *, limit_s: float) -> MeshProgram:
    """Return a program with fewer features that still fails."""
    deadline, is_smaller = time.monotonic() + limit_s, True
    while is_smaller and time.monotonic() < deadline:
        is_smaller = False
        for one in simpler(program):
            why = check(one)
            if why and not why.startswith("refused"):
                program, is_smaller = one, True
                break
    return program


def require_equal(programs: Iterable[MeshProgram]) -> None:
    """Fail, with a smaller program that fails, too, unless every program keeps its promise."""
    counts: Counter[str] = Counter()
    failures = []
    for program in programs:
        why = check(program)
        counts[why if why.startswith("refused") else "FAILED" if why else "equal"] += 1
        if why and not why.startswith("refused"):
            failures.append((program, why))
    print(counts)
    if failures:
        small = shrink(failures[0][0], limit_s=60)
        texts = "\n".join(f"{program!r}: {why}" for program, why in failures)
        pytest.fail(f"{counts}\n{texts}\nsmaller: {small!r}", pytrace=False)


@pytest.mark.slow
def test_a_drawn_mesh_program_is_that_of_one_process_or_is_refused_by_name() -> None:
    require_equal(ORDINARY)


@pytest.mark.soak
def test_a_drawn_program_of_one_axis_is_that_of_one_process() -> None:
    require_equal(MORE)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 100 + SOAK, SOAK_CHUNK))
def test_any_drawn_mesh_program_is_that_of_one_process_or_is_refused_by_name(first: int) -> None:
    largest = 8 if first % 100 else 4
    require_equal(draw_mesh_program(seed, largest=largest) for seed in range(first, first + SOAK_CHUNK))
