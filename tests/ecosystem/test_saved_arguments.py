"""A native training_args.bin is loaded with echelon in the place of transformers' Trainer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ecosystem.run import PYTHON, ROOT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON} (make ecosystem)"),
]

_ARGUMENTS = """
import sys, torch
from transformers import TrainingArguments
if sys.argv[2] == "write":
    torch.save(TrainingArguments("out", learning_rate=0.25, lr_scheduler_type="cosine", logging_steps=7, use_cpu=True, report_to="none"), sys.argv[1])
else:
    args = torch.load(sys.argv[1], weights_only=False)
    assert isinstance(args, TrainingArguments), type(args)
    print("READ", type(args).__module__, args.learning_rate, args.lr_scheduler_type.value, args.logging_steps, args.train_batch_size)
"""


def test_a_native_pickle_of_the_arguments_is_loaded(tmp_path: Path) -> None:
    native = {name: value for name, value in os.environ.items() if not name.startswith("ECHELON_")}
    swapped = {**native, "PYTHONPATH": str(ROOT / "src")}
    first = "import echelon.compat; echelon.compat.install()\n"
    file = str(tmp_path / "training_args.bin")
    subprocess.run([str(PYTHON), "-c", _ARGUMENTS, file, "write"], env=native, cwd=tmp_path, check=True, timeout=300)
    done = subprocess.run(
        [str(PYTHON), "-c", first + _ARGUMENTS, file, "read"],
        env=swapped,
        cwd=tmp_path,
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    expected = "READ echelon.trainer.arguments.training_arguments 0.25 cosine 7 8"
    assert done.stdout.strip().splitlines()[-1] == expected
