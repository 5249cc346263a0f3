"""Runs each script of `scripts/` with accelerate and, with only the import changed, with echelon, and compares the printed values.

``python tests/side_by_side/run.py [--write] [NAME ...]``; ``--write`` writes docs/side_by_side.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from echelon import __version__  # noqa: E402 - this module is also a program
from tests.fork_server import ForkServer  # noqa: E402
from tests.harness import rendezvous  # noqa: E402
from tests.side_by_side.coverage import BEHAVIOURS, NAMES, uses  # noqa: E402
from tests.side_by_side.differences import DIFFERENCES, Difference  # noqa: E402

PEERS = ROOT / ".venv-peers" / "bin" / "python"
PACKAGES = ("accelerate", "echelon")
SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("[0-9]*.py"))
WORLD_SIZES = (1, 2)
TOLERANCE = 1e-6
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The printed values of one script by (rank, name), and its whole output for error messages."""

    codes: list[int]
    values: dict[str, Any]
    output: str


def with_package(source: str, package: str) -> str:
    """Return the script with ``accelerate`` replaced in its import lines, and nowhere else."""
    return re.sub(r"(?m)^(\s*(?:from|import)\s+)accelerate\b", rf"\g<1>{package}", source)


class Forks:
    """A process of the peers' Python that has imported ``package`` and runs scripts as forks of itself."""

    def __init__(self, package: str) -> None:
        self.package = package
        environ = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        self._server = ForkServer(
            [str(PEERS), str(HERE / "forks.py"), package],
            env={
                **environ,
                "ACCELERATE_USE_CPU": "true",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "HF_HUB_OFFLINE": "1",
                "ECHELON_CHECKPOINT_FORMAT": "accelerate",  # the file names are compared as well
                "PYTHONPATH": str(HERE / "standins"),
            },
        )

    def run(self, script: Path, world_size: int, *, timeout_s: float = 120.0) -> Run:
        """Run ``script`` on ``world_size`` processes; a single process gets no variables of torchrun."""
        with (
            tempfile.TemporaryDirectory(prefix="side-by-side-") as folder,
            rendezvous(init_group=world_size == 1) as variables,
        ):
            copy = Path(folder) / script.name
            copy.write_text(with_package(script.read_text(), self.package))
            ranks = range(world_size)
            outputs = [Path(folder) / f"rank{rank}.out" for rank in ranks]
            codes = self._server.run(
                [_environ(rank, world_size, variables) for rank in ranks],
                outputs=[str(path) for path in outputs],
                folder=folder,
                timeout_s=timeout_s,
                grace_s=30.0,
                script=str(copy),
                sys_path=[str(HERE / "scripts")],
            )
            texts = [path.read_text(errors="replace") if path.exists() else "" for path in outputs]
        values = {f"{rank} {name}": value for rank, text in enumerate(texts) for name, value in _values(text)}
        return Run(codes=codes, values=values, output="".join(f"-- rank {r}\n{t}" for r, t in enumerate(texts)))

    def close(self) -> None:
        """End the process."""
        self._server.close()


def _environ(rank: int, world_size: int, variables: Mapping[str, str]) -> dict[str, str]:
    if world_size == 1:
        return {}
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    return {**{name: str(value) for name, value in place.items()}, **variables}


def _values(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the printed values; a repeated name gets a number."""
    seen: dict[str, int] = {}
    for name, value in re.findall(r"(?m)^> (.*?) = (.*)$", text):
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), json.loads(value)


def compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], known: Mapping[str, Difference]) -> list[str]:
    """Return a line for each value that is neither equal nor exactly the known difference.

    Args:
        theirs: accelerate's values by "rank name".
        ours: echelon's.
        known: differences of this script and world size, by "rank name" or name.
    """
    found = []
    for key in sorted({*theirs, *ours}):
        expected = known.get(key) or known.get(_name(key))
        if key not in theirs or key not in ours:
            found.append(f"{key}: printed by {'accelerate' if key in theirs else 'echelon'} only")
        elif expected is None:
            if not _equal(theirs[key], ours[key]):
                found.append(f"{key}: accelerate {theirs[key]!r}, echelon {ours[key]!r}")
        elif not (_equal(theirs[key], expected.theirs) and _equal(ours[key], expected.ours)):
            found.append(
                f"{key}: accelerate {theirs[key]!r}, echelon {ours[key]!r}, and not the known difference "
                f"{expected.theirs!r}, {expected.ours!r}"
            )
    printed = {*theirs, *map(_name, theirs)}
    return found + [f"{name}: a known difference that was not printed" for name in known if name not in printed]


def _name(key: str) -> str:
    return key.split(" ", 1)[1]


def _equal(one: Any, other: Any) -> bool:
    """Compare JSON values: numbers with a fraction to TOLERANCE, everything else exactly."""
    if isinstance(one, float) or isinstance(other, float):
        is_number = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (one, other))
        return is_number and (one == other or abs(one - other) <= TOLERANCE * max(1.0, abs(one)) or one != one != other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="scripts to run (default: all)")
    parser.add_argument("--write", action="store_true", help="write docs/side_by_side.md")
    options = parser.parse_args()
    scripts = [name for name in SCRIPTS if not options.names or name in options.names]
    with ExitStack() as stack:
        forks = [stack.enter_context(closing(Forks(package))) for package in PACKAGES]
        counts, failures = {}, []
        for name in scripts:
            for world_size in WORLD_SIZES:
                theirs, ours = (fork.run(HERE / "scripts" / f"{name}.py", world_size) for fork in forks)
                counts[name, world_size] = len(theirs.values)
                known = DIFFERENCES.get((name, world_size), {})
                found = [run.output for run in (theirs, ours) if any(run.codes)]
                found = found or compare(theirs.values, ours.values, known)
                failures += found
                print(f"{name} on {world_size}: {len(theirs.values)} values, {len(known)} known differences")
                print("".join(f"    {line}\n" for line in found), end="")
    if failures:
        sys.exit("not equal; nothing was written" if options.write else "not equal")
    if options.write:
        (ROOT / "docs" / "side_by_side.md").write_text(_page(counts))


def _page(counts: Mapping[tuple[str, int], int]) -> str:
    probe = "import accelerate, platform, torch; print(accelerate.__version__, torch.__version__, platform.python_version())"
    accelerate, torch, python = subprocess.check_output([str(PEERS), "-c", probe], text=True).split()
    rows, reasons = [], []
    for name in sorted({name for name, _ in counts}):
        known = [DIFFERENCES.get((name, world_size), {}) for world_size in WORLD_SIZES]
        numbers = [
            f"{counts[name, size]} ({len(of)})" if of else f"{counts[name, size]}"
            for size, of in zip(WORLD_SIZES, known)
        ]
        rows.append(f"| `{name}` | {' | '.join(numbers)} |")
        for world_size, of in zip(WORLD_SIZES, known):
            reasons += [
                f"| `{name}` | {world_size} | {value} | `{difference.theirs}` | `{difference.ours}` | {difference.reason} |"
                for value, difference in of.items()
            ]
    used = {
        name: [script[:2] for script in SCRIPTS if name in uses(HERE / "scripts" / f"{script}.py")] for name in _names()
    }
    total = sum(counts.values())
    return "\n".join(
        [
            "# Comparison with accelerate",
            "",
            f"The {len(rows)} scripts below were written for accelerate. Each was run with accelerate and, with only its import changed, "
            f"with echelon. All {total}",
            "printed values are equal (numbers to 1e-6, everything else exactly), except for the deliberate differences below. wandb "
            "is replaced by a stub that records the calls to it.",
            "",
            f"Generated by `python tests/side_by_side/run.py --write` on {datetime.date.today().isoformat()}: echelon {__version__}, "
            f"accelerate {accelerate}, torch {torch}, Python {python}.",
            "",
            "Number of values compared (the number of deliberate differences is in parentheses):",
            "",
            "| script | 1 process | 2 processes |",
            "|---|---|---|",
            *rows,
            "",
            "## Differences",
            "",
            "| script | processes | value | accelerate | echelon | reason |",
            "|---|---|---|---|---|---|",
            *reasons,
            "",
            "## Names and behavior covered by the scripts",
            "",
            "| name | scripts |",
            "|---|---|",
            *[f"| `{name}` | {' '.join(scripts)} |" for name, scripts in used.items()],
            *[f"| {claim} | {script[:2]} |" for claim, (script, _) in BEHAVIOURS.items()],
            "",
        ]
    )


def _names() -> list[str]:
    return [name for names in NAMES.values() for name in names]


if __name__ == "__main__":
    main()
