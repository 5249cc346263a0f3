"""Which scripts' first ranks are forked from a process that has imported torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launch.local.early_imports import early_imports
from echelon.launch.script import Script

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TORCH = ("torch", "torch.distributed")


def _modules(folder: Path, text: str, environment: dict[str, str] | None = None) -> tuple[str, ...]:
    path = folder / "train.py"
    path.write_text(text)
    script = Script(kind="script", target=str(path), args=())
    return early_imports(script, ONE_THREAD if environment is None else environment)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\n", TORCH),
        ("import os\nfrom torch import nn\nnn.Linear(1, 1)\n", TORCH),
        ("import torch\ntorch.optim.SGD\n", (*TORCH, "torch._dynamo")),
        ("import torch\nimport os\nos.environ['A'] = '1'\n", TORCH),
        (
            "from echelon import Accelerator\nimport torch.optim\n",
            (*TORCH, "torch._dynamo", "echelon.accelerator.accelerator"),
        ),
        (
            "from echelon import Trainer\n",
            (*TORCH, "torch._dynamo", "echelon.accelerator.accelerator", "echelon.trainer"),
        ),
        ("print('no torch')\n", ()),
        ("import torchless\n", ()),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n", ()),
        ("from os import putenv\nimport torch\n", ()),
    ],
)
def test_a_script_is_read_for_what_its_ranks_import(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    assert _modules(tmp_path, text) == expected


def test_a_run_with_several_threads_starts_new_programs(tmp_path: Path) -> None:
    assert _modules(tmp_path, "import torch\n", {}) == ()
    assert _modules(tmp_path, "import torch\n", {"OMP_NUM_THREADS": "2"}) == ()
    assert _modules(tmp_path, "import torch\n", {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}) == TORCH


def test_modules_and_programs_start_as_new_programs(tmp_path: Path) -> None:
    assert early_imports(Script(kind="module", target="train", args=()), ONE_THREAD) == ()
    assert early_imports(Script(kind="script", target=str(tmp_path / "missing.py"), args=()), ONE_THREAD) == ()


@pytest.mark.parametrize(
    ("first", "files", "is_early"),
    [
        ("import settings\n", {"settings.py": "import os\nos.environ['OMP_NUM_THREADS'] = '4'\n"}, False),
        ("from tools.start import run\n", {"tools/start.py": "import os\nos.putenv('A', '1')\n"}, False),
        ("import data, settings\n", {"settings.py": "import other\n", "other.py": "from os import environ\n"}, False),
        ("from dotenv import load_dotenv\nload_dotenv()\n", {}, False),
        ("import settings\n", {"settings.py": "SIZE = 3\n"}, True),
    ],
)
def test_modules_beside_the_script_are_read_as_well(
    tmp_path: Path, first: str, files: dict[str, str], is_early: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _modules(tmp_path, f"{first}import torch\n") == (TORCH if is_early else ())
