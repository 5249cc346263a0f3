"""docs/tour.md: its scripts run as they stand there, by its commands, and print what it says; docs/tour.zh.md shows the same.

``python tests/launch/test_tour.py`` writes what differs between the scripts into both pages.
"""

from __future__ import annotations

import difflib
import gzip
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.harness import run_on_ranks
from tests.launch.conftest import Command
from tests.launch.programs import check_lines, run_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "tour.md", ROOT / "docs" / "tour.zh.md"]
MNIST = ROOT / "examples" / "data" / "mnist"
NUM_IMAGES = {"train": 9600, "t10k": 1000}  # 150 steps of 64: a checkpoint at step 100 is one in the middle of an epoch
ACCURACY = re.compile(r"accuracy ([\d.]+) %")


@dataclass(frozen=True)
class Block:
    """A fenced block: ```language title."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(*parts) for parts in found]


def scripts(page: Path) -> dict[str, str]:
    return {block.title: block.text for block in blocks(page) if block.language == "python"}


def difference(title: str, page: Path) -> str:
    """Return what the second of two scripts changes in the first (``title`` names both)."""
    before, after = (scripts(page)[name].splitlines() for name in title.split())
    _, _, _, *lines = difflib.unified_diff(before, after, n=1, lineterm="")
    return "".join("@@\n" if line.startswith("@@") else f"{line}\n" for line in lines)


def written(page: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        return f"```diff {match[1]}\n{difference(match[1], page)}```\n"

    return re.sub(
        r"^```diff ([^\n]*)\n.*?^```\n", fill, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder ``mnist`` with the first images only: files of MNIST all the same."""
    folder = tmp_path_factory.mktemp("tour") / "mnist"
    folder.mkdir()
    for source in MNIST.glob("*.gz"):
        part, kind, *_ = source.name.split("-")
        header, size = (16, 784) if kind == "images" else (8, 1)
        with gzip.open(source) as file:
            magic, _, dims = file.read(4), file.read(4), file.read(header - 8)
            values = file.read(NUM_IMAGES[part] * size)
        with gzip.open(folder / source.name, "wb", compresslevel=1) as file:
            file.write(magic + NUM_IMAGES[part].to_bytes(4, "big") + dims + values)
    return folder


class Reader:
    """Somebody who follows the tour in a folder of his own."""

    def __init__(self, command: Command, data: Path) -> None:
        self._command = command
        self.folder = command.directory
        (self.folder / "mnist").symlink_to(data)
        for name, text in scripts(PAGES[0]).items():
            command.write(name, text)

    def follow(self, title: str, start: Callable[[str], str]) -> list[str]:
        """Start each command of the block ``title``; what it prints must hold the lines that follow it there, in order."""
        (block,) = [block for block in blocks(PAGES[0]) if (block.language, block.title) == ("console", title)]
        outputs = []
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, *expected = part.splitlines()
            outputs.append(start(line))
            check_lines(outputs[-1], expected)
            assert all(float(percent) > 80 for percent in ACCURACY.findall(outputs[-1])), outputs[-1]
        assert outputs
        return outputs

    def type(self, line: str) -> str:
        """Run a line in a shell that finds this environment's programs."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        result = self._command.run(["bash", "-c", f"{line} 2>&1"], PATH=path, OMP_NUM_THREADS="1")
        assert result.code == (2 if "num_proceses" in line else 0), result.out
        return result.out

    def on_ranks(self, line: str) -> str:
        """Do what the command does with processes that are there already: seconds less for each."""
        count = re.search(r"(?:num_processes|nproc-per-node) (\d+)", line)
        world_size = int(count[1]) if count else 1
        environ = {"ECHELON_PARITY": "exact"} if "--parity exact" in line else {}
        script = line.split()[-1]
        return run_on_ranks(run_program, script, str(self.folder), environ, world_size=world_size, init_group=False)[0]


def _stopped_at_its_first_checkpoint(script: str, folder: str) -> None:
    from echelon import Accelerator, Trainer

    def and_stop(save: Callable[..., Any]) -> Callable[..., None]:
        def save_and_stop(*args: Any, **kwargs: Any) -> None:
            save(*args, **kwargs)
            raise KeyboardInterrupt  # Ctrl-C at the best moment

        return save_and_stop

    kind, name = (Trainer, "_save_checkpoint") if "trainer" in script else (Accelerator, "save_state")
    with mock.patch.object(kind, name, and_stop(getattr(kind, name))), pytest.raises(KeyboardInterrupt):
        run_program(script, folder)


@pytest.fixture
def reader(command: Command, data: Path) -> Reader:
    return Reader(command, data)


@pytest.mark.slow
@pytest.mark.parametrize("title", ["ddp", "accelerator", "trainer"])
def test_the_scripts_print_what_the_page_says(title: str, reader: Reader) -> None:
    reader.follow(title, reader.on_ranks)


@pytest.mark.slow
def test_the_data_that_the_page_makes_can_be_learned(command: Command) -> None:
    for name, text in scripts(PAGES[0]).items():
        # Fewer images, so that it takes a second.
        command.write(name, text.replace("60000", str(NUM_IMAGES["train"])).replace("10000", str(NUM_IMAGES["t10k"])))
    for program in ("make_digits.py", "plain.py"):
        output = run_on_ranks(run_program, program, str(command.directory), {}, world_size=1, init_group=False)[0]
    accuracies = [float(percent) for percent in ACCURACY.findall(output)]
    assert len(accuracies) == 2
    assert min(accuracies) > 80


@pytest.mark.slow
def test_the_accelerator_stopped_and_resumed_prints_what_the_plain_loop_prints(reader: Reader) -> None:
    (plain,) = reader.follow("plain", reader.on_ranks)
    run_on_ranks(_stopped_at_its_first_checkpoint, "resume.py", str(reader.folder), world_size=1, init_group=False)
    (resumed,) = reader.follow("resume", reader.on_ranks)
    assert "resuming after step 100\n" in resumed
    assert _epochs(resumed) == _epochs(plain)
    assert len(_epochs(plain)) == 2


@pytest.mark.slow
def test_the_trainer_stopped_and_resumed_prints_what_it_prints_in_one_go(reader: Reader) -> None:
    whole = reader.on_ranks("python trainer.py")
    run_on_ranks(
        _stopped_at_its_first_checkpoint, "resume_trainer.py", str(reader.folder), world_size=1, init_group=False
    )
    assert (reader.folder / "run_trainer" / "checkpoint-100").is_dir()
    assert not (reader.folder / "run_trainer" / "checkpoint-200").exists()
    resumed = reader.on_ranks("python resume_trainer.py")
    assert (reader.folder / "run_trainer" / "checkpoint-300").is_dir()
    assert ACCURACY.findall(resumed)[-1:] == ACCURACY.findall(whole)[-1:] != []


@pytest.mark.slow
def test_with_exact_parity_three_processes_print_what_one_prints(reader: Reader) -> None:
    one, three = reader.follow("exact", reader.on_ranks)
    accuracies = [[float(percent) for percent in ACCURACY.findall(output)] for output in (one, three)]
    assert len(accuracies[0]) == 2
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.2)  # sums in another order: two of the 1,000 images


def test_a_mistake_is_told_as_the_page_says(reader: Reader) -> None:
    reader.follow("mistake", reader.type)


@pytest.mark.soak
@pytest.mark.parametrize("title", ["plain", "ddp", "torchrun", "accelerator", "exact", "trainer"])
def test_the_commands_print_what_the_page_says(title: str, reader: Reader) -> None:
    reader.follow(title, reader.type)


def _epochs(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("epoch ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_differences_are_those_of_the_scripts(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == written(page), "run python tests/launch/test_tour.py"


@pytest.mark.parametrize("name", ["README", "docs/tour"])
def test_the_chinese_page_shows_the_same_code(name: str) -> None:
    def code(page: Path) -> list[str]:
        return [re.sub(r" *#.*", "", block.text) for block in blocks(page)]

    english, chinese = code(ROOT / f"{name}.md"), code(ROOT / f"{name}.zh.md")
    assert len(english) >= 4
    assert english == chinese


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
