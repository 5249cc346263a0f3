"""In a Chinese locale, what echelon's commands print is Chinese; files and JSON stay English."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.cli.main import _run
from echelon.status.run_files import append_line
from tests.recorded_runs import write_run

_CHINESE = re.compile("[\u4e00-\u9fff]")
_PROSE = re.compile(r"(?<![\w./=-])[a-z]{2,} [a-z]{2,}(?![\w/=(])")
# Command lines, and the events that write_run invents, which have the language in which they were recorded.
_CODE = re.compile(
    r"echelon \w+|rank 0 was killed by signal 9|saved checkpoint-\d+|saved step \d+ to \S+|"
    r"\d+ process(es)? \w+|the run .*"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "echelon-runs"
    write_run(runs, "one", num_ranks=2, num_steps=20, kills=(13,))
    write_run(runs, "two", num_steps=30, lr=5e-4, began=1_790_009_000.0, facts={"outcome": "failed"})
    shutil.rmtree(runs / "two" / "records")
    append_line(
        runs / "two" / "events.jsonl", {"time": 2e9, "kind": "resume", "step": 16, "text": "resumed at step 16"}
    )
    for rank in range(2):
        (runs / "one" / "attempt_0" / f"rank_{rank}").mkdir(parents=True)
    (runs / "one" / "attempt_0" / "stall_1.txt").write_text("\u5361\u4f4f", encoding="utf-8")
    return tmp_path


def _shown(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    capsys.readouterr()
    assert _run(list(argv)) == code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("runs", "ls"), "\u6210\u529f"),
        (("runs", "show", "one"), "  \u5de5\u4f5c\u76ee\u5f55"),
        (("runs", "compare"), "* \u4e0d\u540c"),
        (("runs", "ls"), "0\uff08\u4ece step 16 \u7eed\u8bad\uff09"),
        (("watch", "--once", "one"), "2 \u4e2a\u8fdb\u7a0b"),
        (("doctor", "echelon-runs/one"), "rank_0\uff1a\u6ca1\u6709\u8bb0\u5f55\u5806\u6808"),
        (("doctor", "echelon-runs/two"), "\u6ca1\u6709 rank \u5361\u4f4f\u6216\u51fa\u9519"),
        (("config", "explain"), "\u9ed8\u8ba4\u503c"),
        (("config", "explain", "--changed", "--run", "one"), "\u547d\u4ee4\u884c\u53c2\u6570"),
        (("env",), "\u53ef\u6253\u5f00\u7684\u6587\u4ef6\u6570"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_commands_print_chinese(
    argv: tuple[str, ...], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _shown(capsys, *argv)
    assert any(expected in line for line in lines), lines
    mixed = [line for line in lines if _CHINESE.search(line) and _PROSE.search(_CODE.sub("", line))]
    assert mixed == []


def test_checkpoint_show_and_ls_and_verify_print_chinese(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(folder / "saved"))
    shown = "\n".join(_shown(capsys, "checkpoint", "show", str(folder / "saved")))
    for expected in (
        "\u8def\u5f84",
        "\u4f18\u5316\u5668 0",
        "\u7b2c 0 \u7ec4\uff1a2 \u4e2a\u53c2\u6570",
        " \u4e2a\u5f20\u91cf",
    ):
        assert expected in shown
    assert "\u5b8c\u597d\uff1a" in _shown(capsys, "checkpoint", "verify", str(folder / "saved"))[0]
    assert _shown(capsys, "checkpoint", "ls", str(folder))[0].split()[0] == "\u540d\u79f0"


def test_json_stays_english(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (("runs", "ls", "--json"), ("env", "--json")):
        assert not _CHINESE.search("\n".join(_shown(capsys, *argv)))
