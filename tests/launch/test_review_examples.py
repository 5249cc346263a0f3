"""The examples on Chinese reviews: one program four times, its data, and what it says of a file that it cannot read."""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.harness import run_on_ranks
from tests.launch.programs import run_program

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REVIEWS = EXAMPLES / "data" / "reviews" / "reviews.csv"
GOOD, BAD = "好评", "差评"


def _run(script: str, folder: str, *arguments: str) -> str:
    """Run an example as a program in this process, and return what it prints; torchrun's variables are set."""
    return run_program(str(EXAMPLES / script), folder, arguments=arguments)


def _accuracies(printed: str) -> list[float]:
    return [float(percent) for percent in re.findall(r"test accuracy ([\d.]+) %", printed)]


def _data(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import reviews_data

    return reviews_data


def _easy_file(folder: Path, encoding: str) -> Path:
    """Write reviews of which each character tells the label."""
    lines = [
        f"{label},{'好很棒喜欢'[i % 5] * 3 if label else '坏太差讨厌'[i % 5] * 3}{i}号"
        for i in range(80)
        for label in (0, 1)
    ]
    path = folder / f"{encoding}.csv"
    path.write_bytes("\r\n".join(["label,review", *lines, ""]).encode(encoding))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_level_learns_and_classifies_a_sentence(num_processes: int, tmp_path: Path) -> None:
    options = ["--csv", str(_easy_file(tmp_path, "gb18030")), "--epochs", "3", "--batch_size", str(16 // num_processes)]
    options += ["--learning_rate", "0.002", "--text", "很棒喜欢"]
    levels = ["reviews_accelerator.py", "reviews_trainer.py"]
    if num_processes == 1:
        levels = ["reviews_plain.py", "reviews_data_parallel.py", *levels]
    printed = {}
    for script in levels:
        first, *others = run_on_ranks(
            _run, script, str(tmp_path), *options, world_size=num_processes, init_group=False, timeout=120
        )
        assert all(GOOD not in other for other in others), "one process classifies the sentence"
        assert _accuracies(first)[-1] == 100.0, first
        assert first.splitlines()[-1].startswith(f"很棒喜欢 -> {GOOD} ("), first
        printed[script] = first
    if num_processes == 1:  # without a second device these are the plain loop, to the last digit
        assert printed["reviews_plain.py"] == printed["reviews_accelerator.py"] == printed["reviews_data_parallel.py"]


def test_the_examples_are_short() -> None:
    for path in EXAMPLES.glob("reviews_*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= (150 if path.stem == "reviews_data" else 55)


def test_the_reviews_of_the_repository_are_balanced_and_different() -> None:
    with REVIEWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert collections.Counter(row["label"] for row in rows) == {"0": 2000, "1": 2000}
    assert len({row["review"] for row in rows}) == 4000
    assert all(10 <= len(row["review"]) <= 120 for row in rows)
    assert "MIT" in (REVIEWS.parent / "LICENSE").read_text()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
def test_files_as_chinese_users_have_them_are_read(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.csv"
    rows = ["label,review", *["1,很好", '0,"太差, 再也不来\n真的"'] * 5, "1,", "0,  "]
    path.write_bytes("\r\n".join(rows).encode(encoding))
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        reviews = _data(monkeypatch).read_reviews(path)
    assert reviews == [(1, "很好"), (0, "太差, 再也不来\n真的")] * 5
    assert told.getvalue() == f"{path}: 2 rows without a review are skipped; the first is line 17\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("label,review\n1,好\n2,坏\n", "line 3: the label must be 1 (good) or 0 (bad), not '2'"),
        ("label,review\n1,好\n好极了\n", "line 3: the label must be 1 (good) or 0 (bad), not '好极了'"),
        ("label,review\n1,好,很好\n", "line 2: more columns than in line 1"),
        ("label,text\n1,好\n", "line 1: the columns must be label and review, not ['label', 'text']"),
        ('label,review\n1,好\n0,"坏"了\n', "line 3: ',' expected after"),
        ("", "line 1: the columns must be label and review, not None"),
        ("label,review\n1,好\n", "has 1 reviews; at least 10 are needed"),
        ("label,review\n1,好的\n".encode() + b"0,\xe5\xa5\n", "line 3: neither UTF-8 nor GB18030"),  # GB18030 would do
        ("label,review\n1,好\n".encode("utf-16"), "line 1: neither UTF-8 nor GB18030"),
        ("label,review\n1,好\n0,".encode("gb18030") + b"\xff\n", "line 3: neither UTF-8 nor GB18030"),
    ],
)
def test_a_bad_row_is_an_error_with_its_line(
    content: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SystemExit) as caught:
        _data(monkeypatch).read_reviews(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"there is no file .*nowhere\.csv: give --csv a file"):
        _data(monkeypatch).read_reviews(tmp_path / "nowhere.csv")


def test_without_transformers_they_say_what_to_install() -> None:
    with mock.patch.dict(sys.modules, {"tokenizers": None}):  # an import of it fails, as where it is missing
        with pytest.raises(SystemExit, match="need tokenizers, which is not installed: pip install transformers"):
            runpy.run_path(str(EXAMPLES / "reviews_data.py"))


def test_a_pretrained_model_of_a_folder_is_trained_on(tmp_path: Path) -> None:
    """The folder is what the Trainer's example saved."""
    options = ["--csv", str(_easy_file(tmp_path, "utf-8")), "--learning_rate", "0.002", "--text", "很棒喜欢"]
    run_on_ranks(_run, "reviews_trainer.py", str(tmp_path), *options, world_size=1, init_group=False, timeout=120)
    options += ["--model", str(tmp_path / "outputs" / "reviews"), "--learning_rate", "1e-9", "--epochs", "1"]
    (printed,) = run_on_ranks(
        _run, "reviews_plain.py", str(tmp_path), *options, world_size=1, init_group=False, timeout=120
    )
    assert printed.splitlines()[-1].startswith(f"很棒喜欢 -> {GOOD} ("), printed


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "num_processes"),
    [
        ("reviews_plain.py", 1),
        ("reviews_data_parallel.py", 1),
        ("reviews_accelerator.py", 1),
        ("reviews_accelerator.py", 2),
        ("reviews_trainer.py", 1),
        ("reviews_trainer.py", 2),
    ],
)
def test_all_reviews_are_learnt_better_than_by_chance(script: str, num_processes: int, tmp_path: Path) -> None:
    launch = ["-m", "echelon", "launch", "--cpu", "--num_processes", str(num_processes)] if num_processes > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLES / script)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert _accuracies(done.stdout)[-1] > 70  # a coin: 50 +- 2.5
    assert GOOD in done.stdout.splitlines()[-1]
