"""The code blocks of the documents run as they stand, each alone; those that cannot run here have valid syntax, names and commands."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from echelon.base.errors import EchelonError
from echelon.cli.main import cli
from tests.documents import PYTHON, ROOT, SHELL, Block, blocks, commands, documents
from tests.harness import run_on_ranks
from tests.launch.programs import run_program

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A Chinese page shows the code of its English page (tests/test_documents.py).
PAGES = [page for page in documents() if not page.name.endswith(".zh.md")]
BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [block for block in BLOCKS if block.language in PYTHON]
SCRIPTS = [block for block in BLOCKS if block.language in SHELL]
# Programs of others, whose arguments are not checked.
OTHERS = {
    "accelerate", "apt-get", "cat", "cd", "conda", "curl", "docker", "export", "git", "jupyter", "kubectl", "ls", "nvidia-smi",
    "sbatch", "scancel", "sinfo", "squeue", "srun", "ssh", "source", "tail", "tar", "tensorboard", "tmux", "torchrun", "unzip", "cp",
    "mkdir", "rm", "scp", "kill",
}  # fmt: skip
# The script that a command trains if its page shows none.
TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from echelon import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for (x,) in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


PLAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=4):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("block", [block for block in PROGRAMS if block.mark in ("", "run on")], ids=str)
def test_a_python_block_runs_alone(block: Block, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block.text)
    world_size = int(block.reason[0]) if block.mark else 1
    run_on_ranks(run_program, "block.py", str(tmp_path), world_size=world_size, init_group=False)


def test_every_python_block_is_valid_and_knows_its_names(tmp_path: Path) -> None:
    for number, block in enumerate(PROGRAMS):
        # The name of a file becomes the place that ruff reports.
        (tmp_path / f"{number:04}_{block.page.replace('/', '_')}_{block.line}.py").write_text(block.text)
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F821,F822,F823",
        "--output-format",
        "concise",
        ".",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def _missing_imports(block: Block) -> Iterator[str]:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "echelon":
            module = importlib.import_module(str(node.module))
            yield from (
                f"{block}: {node.module} has no {name.name}" for name in node.names if not hasattr(module, name.name)
            )


def test_every_name_that_a_block_imports_from_echelon_is_there() -> None:
    assert [problem for block in PROGRAMS for problem in _missing_imports(block)] == []


def wrong_command(text: str, page: str = "") -> str | None:
    """Return what is wrong with a command of a shell block, without running it."""
    text = re.sub(r"<<-?\s*'?(\w+)'?.*", "", text)
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        return str(error)
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    for end in ("&&", "||", "|", ";", "&"):
        if end in words:
            before, after = words[: words.index(end)], words[words.index(end) + 1 :]
            return wrong_command(shlex.join(before), page) or (
                wrong_command(shlex.join(after), page) if after else None
            )
    if not words or (words[0] in OTHERS and not (words[0] == "srun" and "echelon" in words)):
        return None
    if words[0] == "srun":
        words = words[words.index("echelon") :]
    name, *arguments = words
    if name == "echelon" or (name.startswith("python") and arguments[:2] == ["-m", "echelon"]):
        return _wrong_echelon(arguments[2:] if name.startswith("python") else arguments)
    if name == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        missing = [word for word in arguments if re.fullmatch(r"[a-z-]+", word) and word not in targets]
        return f"the Makefile has no target {missing[0]}" if missing else None
    if name.endswith("pip") or (name.startswith("python") and arguments[:2] == ["-m", "pip"]):
        return _wrong_extra(text)
    if name.startswith("python") or name.endswith("/python"):
        file = next((word for word in arguments if word.endswith(".py")), "")
        known = {block.title for block in BLOCKS if block.page == page} | {"train.py", "script.py", ""}
        return None if file in known or (ROOT / file).exists() else f"there is no {file}"
    return f"unknown program {name}"


def _wrong_echelon(arguments: list[str]) -> str | None:
    command: click.Command = cli
    context = click.Context(cli, info_name="echelon", token_normalize_func=lambda name: name.replace("_", "-"))
    while isinstance(command, click.Group):
        if not arguments or arguments[0] in ("--help", "--version", "-h"):
            return None
        name = arguments.pop(0)
        below = command.get_command(context, name)
        if below is None:
            return f"echelon has no command {name}"
        command = below
    try:
        with command.make_context(command.name, arguments, parent=context, resilient_parsing=False):
            return None
    except (click.NoSuchOption, click.MissingParameter) as error:
        return error.format_message()
    except (click.exceptions.Exit, click.ClickException, EchelonError):
        return None  # a help text, or a value such as a file that exists on the reader's machine


def _wrong_extra(text: str) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = [name.strip() for found in re.findall(r"\[([\w, -]+)\]", text) for name in found.split(",")]
    missing = [name for name in named if name not in extras]
    return f"pyproject.toml has no extra {missing[0]}" if missing else None


@pytest.mark.parametrize("page", sorted({block.page for block in SCRIPTS}))
def test_every_command_exists_with_its_options(page: str) -> None:
    found = [
        (block, command)
        for block in SCRIPTS
        if block.page == page and block.mark != "run by"
        for command in commands(block)
    ]
    problems = [f"{block}: {command}: {wrong}" for block, command in found if (wrong := wrong_command(command, page))]
    assert problems == []


def test_a_wrong_command_is_reported() -> None:
    assert wrong_command("echelon lunch train.py") == "echelon has no command lunch"
    assert "--prozesses" in str(wrong_command("echelon launch --prozesses 2 train.py"))
    assert "--nodse" in str(wrong_command("X=1 srun -N 2 echelon launch --nodse 2 train.py"))
    assert wrong_command("make nothing") == "the Makefile has no target nothing"
    assert wrong_command("cd a && make nothing") == "the Makefile has no target nothing"
    assert wrong_command("pip install 'echelon[tensorbord]'") == "pyproject.toml has no extra tensorbord"
    assert wrong_command("python nothing.py") == "there is no nothing.py"
    assert wrong_command("echlon env") == "unknown program echlon"
    assert wrong_command("echelon launch --num_processes 2 train.py --lr 0.1  # on both") is None


@pytest.mark.soak
@pytest.mark.parametrize("block", [block for block in SCRIPTS if not block.mark], ids=str)
def test_a_shell_block_runs(block: Block, tmp_path: Path) -> None:
    """In a folder with the page's named programs, train.py and examples/, and with the environment's commands."""
    for name in ("train.py", "script.py", "ddp.py"):
        (tmp_path / name).write_text(TRAIN)
    (tmp_path / "plain.py").write_text(PLAIN)
    for other in BLOCKS:
        if other.page == block.page and re.fullmatch(r"[\w-]+\.\w+", other.title):
            (tmp_path / other.title).write_text(other.text)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = block.text if block.language != "console" else "\n".join(commands(block))
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "ACCELERATE_USE_CPU": "true"
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
