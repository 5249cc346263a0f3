"""``echelon test`` shows, notes and judges what its ranks tell; a small program stands in the place of these."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from echelon.cli.main import cli

# It gets `-m echelon launch FLAGS -m PROGRAM layout FOLDER`, or `-m PROGRAM alone FOLDER`, and does what its part of WANTED says.
_PROGRAM = """#!{python}
import json, os, sys, time
part = "layout" if "launch" in sys.argv else "alone"
folder = sys.argv[sys.argv.index(part) + 1]
wanted = json.loads({wanted!r})[part]
open({log!r}, "a").write(json.dumps([part, sys.argv[1:], sorted(os.environ)]) + "\\n")
with open(folder + "/findings.jsonl", "a") as file:
    for line in wanted["told"]:
        file.write(json.dumps(line) + "\\n")
print(wanted.get("says", ""), file=sys.stderr)
time.sleep(wanted.get("sleeps", 0))
sys.exit(wanted["code"])
"""


def _found(name: str, passed: bool | None = True, **more: Any) -> dict[str, Any]:
    return {"name": name, "passed": passed, "text": f"{name} is told", "do": f"mend {name}", "figures": {}, **more}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def run(*flags: str, **wanted: Any) -> Result:
        program, log = tmp_path / "python", tmp_path / "log"
        program.write_text(
            _PROGRAM.format(python=sys.executable, wanted=json.dumps(wanted), log=str(log)), encoding="utf-8"
        )
        program.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(program))
            return CliRunner().invoke(cli, ["test", "--output", "evidence.json", *flags])

    return run


def _log(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]


def _evidence(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "evidence.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


LAYOUT = [
    _found("world"),
    {"started": "exact"},
    _found("exact"),
    _found("data"),
    _found("restart"),
    _found("bandwidth"),
]


def test_reports_of_the_ranks_are_printed_and_saved(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SEED", "3")
    collectives = [
        {"name": "all_reduce", "size_bytes": size, "seconds": 2e-3, "algorithm_gb_per_s": 0.5, "bus_gb_per_s": 0.75}
        for size in (1 << 10, 1 << 20)
    ]
    told = [*LAYOUT[:-1], _found("bandwidth", figures={"collectives": collectives})]
    result = run(
        *("--quick", "--cpu", "--main_process_ip=127.0.0.1", "--num_processes", "2"),
        layout={"told": told, "code": 0},
        alone={"told": [_found("bitwise")], "code": 0},
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    names = ["world", "exact", "data", "restart", "bandwidth", "bitwise"]
    assert [line.split()[1] for line in lines if line.startswith(("ok ", "\u2713 "))] == names
    assert "    all_reduce      1.0 KB: 2000 us                   1.0 MB: 2000 us   0.500 (0.750)" in lines
    assert lines[-1].startswith("every check passed (")
    assert lines[-1].endswith("evidence.json")
    evidence = _evidence(tmp_path)
    assert evidence["passed"] is True
    assert [check["name"] for check in evidence["checks"]] == names
    assert evidence["checks"][4]["figures"]["collectives"] == collectives
    assert evidence["flags"] == ["--cpu", "--main_process_ip", "--num_processes"]
    assert {"echelon", "python", "torch"} <= evidence["versions"].keys()
    (part, argv, variables), (alone, _, own_variables) = _log(tmp_path)
    assert (part, alone) == ("layout", "alone")
    assert argv[:3] == ["-m", "echelon", "launch"]
    assert argv[-5:-2] == ["-m", "echelon.testing.self_test", "layout"]
    assert argv[-1] == "--quick"
    assert {"--cpu", "--max_restarts"} <= set(argv)
    assert "ECHELON_SEED" in variables
    assert "ECHELON_SEED" not in own_variables  # it stands for one process without a layout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evidence.json", "log", "python"]


def test_a_failed_check_sets_the_exit_code_and_shows_a_remedy(run: Any, tmp_path: Path) -> None:
    told = [*LAYOUT[:2], _found("exact", False), *LAYOUT[3:], _found("bitwise", None)]
    result = run(layout={"told": told, "code": 0})
    assert result.exit_code == 1
    assert "exact is told" in result.output
    assert "do: mend exact" in result.output
    assert "failed: exact (" in result.output
    assert "- bitwise" in result.output
    assert _evidence(tmp_path)["passed"] is False
    assert [part for part, *_ in _log(tmp_path)] == ["layout"]  # what was left out is not made alone


def test_in_a_chinese_locale_the_screen_is_chinese_and_the_file_english(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGUAGE", "zh_CN")
    text, shown = "training on 2 ranks and on 1 rank produces bit-identical weights", "\u9010\u4f4d\u76f8\u540c"
    told = [*LAYOUT, {**_found("bitwise"), "text": text, "shown": [shown, ""]}]
    lines = run(layout={"told": told, "code": 0}).output.splitlines()
    assert shown in lines[-2]
    assert lines[-1].startswith("\u5168\u90e8\u68c0\u67e5\u901a\u8fc7")
    assert _evidence(tmp_path)["checks"][-1]["text"] == text


def test_a_failed_start_is_reported_and_fails_the_current_check(run: Any, tmp_path: Path) -> None:
    report = "\n".join(f"line {i}" for i in range(60)) + "\nechelon: rank 1 failed first"
    result = run(layout={"told": LAYOUT[:2], "code": 1, "says": report})
    assert result.exit_code == 1
    assert "exact      the processes exited with code 1" in result.output
    assert "    | echelon: rank 1 failed first" in result.output
    assert "line 0\n" not in result.output
    output = Path(result.output.partition("the complete output is in ")[2].partition("\n")[0])
    assert "line 0\n" in output.read_text(encoding="utf-8")
    assert [(check["name"], check["passed"]) for check in _evidence(tmp_path)["checks"]] == [
        ("world", True),
        ("exact", False),
    ]
    shutil.rmtree(output.parent)


def test_an_invalid_setting_is_reported_like_by_the_launcher(run: Any, tmp_path: Path) -> None:
    result = run(layout={"told": [], "code": 2, "says": "echelon: this machine has no accelerator"})
    assert result.exit_code == 2
    assert result.output == "echelon: this machine has no accelerator\n"
    assert not (tmp_path / "evidence.json").exists()


def test_a_run_without_local_ranks_prints_nothing(run: Any) -> None:
    result = run(layout={"told": [], "code": 0})
    assert result.exit_code == 1
    assert "none of the run's processes is on this machine" in result.output


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["train.py"], "echelon test runs its own program, not 'train.py'"),
        (["--output", "none/x.json"], "the folder none does not exist"),
    ],
)
def test_a_wrong_command_line_starts_nothing(run: Any, tmp_path: Path, flags: list[str], what: str) -> None:
    result = run(*flags)
    assert what in str(result.exception)
    assert not (tmp_path / "log").exists()


def test_an_unknown_launcher_flag_is_named(run: Any) -> None:
    result = run("--num_proceses", "2")
    assert result.exit_code == 2
    assert "--num-proceses" in result.output


@pytest.mark.parametrize(
    ("gpus", "flags"),
    [("all", ["--num_processes", "gpu"]), ("2", ["--num_processes", "2"]), ("0,2", ["--gpu_ids", "0,2"])],
)
def test_gpus_are_flags_of_the_launcher(run: Any, tmp_path: Path, gpus: str, flags: list[str]) -> None:
    run("--gpus", gpus, layout={"told": LAYOUT, "code": 1})
    argv = _log(tmp_path)[0][1]
    assert argv[argv.index(flags[0]) :][:2] == flags


@pytest.mark.slow
def test_an_interrupt_ends_the_ranks(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if (tmp_path / "log").exists():
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", interrupted)
    began = time.monotonic()
    result = run(layout={"told": [], "code": 0, "sleeps": 100})
    assert result.exit_code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 60
    assert "stopped by SIGTERM" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "python"]
