"""The pages of docs/guides and docs/migrating: their programs run alone, and their commands print what the pages say.

A block ```` ```python train.py ```` is a file of the reader's folder, and a block ```` ```console ```` holds commands to type there, each
followed by lines that it prints, in order (numbers may differ; ``...`` stands for lines left out).

``python tests/launch/test_guides.py`` writes what differs between the scripts into the pages.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

import pytest

from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.launch.conftest import Command
from tests.launch.programs import check_lines, hashes_of, run_program
from tests.launch.test_tour import ROOT, Block, blocks, scripts, written

GUIDES = (
    "accumulation.md", "checkpoints_and_resume.md", "deepspeed_configs.md", "hangs.md", "kubernetes.md", "lora.md", "notebooks.md",
    "one_to_many_processes.md", "precision.md", "ray.md", "reproducibility.md", "several_machines.md", "sharding.md", "slurm.md",
)  # fmt: skip
MIGRATING = ("from_accelerate.md", "from_lightning_fabric.md", "from_raw_ddp.md", "from_transformers_trainer.md")
PAGES = sorted([*(ROOT / "docs" / "guides").glob("*.md"), *(ROOT / "docs" / "migrating").glob("*.md")])
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh.md")]
# Programs that take seconds to import, or that need another package, run by `make soak` and where they can.
_LIBRARIES = re.compile(
    r"^\s*(?:import|from) (accelerate|transformers|peft|lightning|deepspeed|ray|echelon\.ray)\b", re.MULTILINE
)

# Pages with a setting that has no effect on one process, or no counterpart, which is one warning; the others must not warn.
_WARN = ("deepspeed_configs", "sharding")


def _is_light(text: str) -> bool:
    return _LIBRARIES.search(text) is None


def _write_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if re.fullmatch(r"[\w.]+\.\w+", block.title):  # a program or a file of settings
            (folder / block.title).write_text(block.text, encoding="utf-8")


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Return each command of a console block, with the lines that the page shows below it."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    return [
        (lines[0], [line for line in lines[1:] if line.strip() not in ("", "...")])
        for lines in map(str.splitlines, parts)
    ]


def _run(name: str, folder: str, may_warn: bool) -> str:
    with warnings.catch_warnings():
        if may_warn:
            warnings.simplefilter("ignore", EchelonWarning)
        return run_program(name, folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_the_programs_run_alone(page: Path, tmp_path: Path) -> None:
    light = [name for name, text in scripts(page).items() if _is_light(text)]
    _write_files(page, tmp_path)
    for name in light:
        run_on_ranks(_run, name, str(tmp_path), page.stem in _WARN, world_size=1, init_group=False)
    assert light or page.stem in ("lora", "ray", "from_transformers_trainer", "kubernetes"), (
        f"{page.name} has no program"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_differences_are_those_of_the_scripts(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == written(page), "run python tests/launch/test_guides.py"


def test_every_page_is_here() -> None:
    assert sorted(page.name for page in ENGLISH) == sorted(GUIDES + MIGRATING)


@pytest.mark.soak
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_the_commands_print_what_the_page_says(page: Path, command: Command) -> None:
    _write_files(page, command.directory)
    for package in {found[1].split(".")[-1] for text in scripts(page).values() for found in _LIBRARIES.finditer(text)}:
        pytest.importorskip(package)
    shown: list[str] = []
    printed: list[str] = []
    for block in blocks(page):
        for line, expected in commands(block) if block.language == "console" else []:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            result = command.run(["bash", "-c", f"{line} 2>&1"], PATH=path, OMP_NUM_THREADS="1")
            check_lines(result.out.replace(f"{command.directory}/", ""), expected)
            shown += hashes_of("\n".join(expected))
            printed += hashes_of(result.out)
    assert len(shown) == len(printed)
    assert len(set(zip(shown, printed))) == len(set(shown)), (
        f"equal hashes on the page: {shown}, in the output: {printed}"
    )


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
