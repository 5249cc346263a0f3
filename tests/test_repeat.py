"""``python -m tests.repeat``: a start that was stopped is gone on with from its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import repeat


def test_a_stopped_start_resumes_after_the_last_recorded_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, str]] = []
    codes = {"a.py": 0, "b.py": 1, "empty.py": 5}

    def run(path: Path, *, number: int, file: str) -> repeat.Run:
        if (number, path.name) == (2, "b.py") and not is_second:
            raise KeyboardInterrupt
        calls.append((number, path.name))
        failed = [f"{path.name}::test_b"] * (codes[path.name] == 1)
        return repeat.Run(round=number, file=file, code=codes[path.name], failed=failed, seconds=2.5)

    monkeypatch.setattr(repeat, "run_file", run)
    record = tmp_path / "record.jsonl"
    arguments = ["--times", "3", "--record", str(record), *(str(tmp_path / name) for name in codes)]
    is_second = False
    with pytest.raises(KeyboardInterrupt):
        repeat.main(arguments)
    # Those without a test are left out of the later rounds.
    assert calls == [(1, "a.py"), (1, "b.py"), (1, "empty.py"), (2, "a.py")]
    with record.open("a", encoding="utf-8") as file:
        file.write('{"round": 2, "file": "cut o')

    calls.clear()
    capsys.readouterr()
    is_second = True
    assert repeat.main(arguments) == 1
    assert calls == [(2, "b.py"), (3, "a.py"), (3, "b.py")]
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert [(line["round"], Path(line["file"]).name) for line in lines] == [
        *((1, "a.py"), (1, "b.py"), (1, "empty.py")),
        *((2, "a.py"), (2, "b.py"), (3, "a.py"), (3, "b.py")),
    ]
    said = capsys.readouterr().out
    assert "goes on after 4 runs" in said
    assert "round 1 of 3: 8 s, 1 failures so far" in said
    assert "round 3 of 3: 5 s, 3 failures so far" in said
    assert "7 runs in 18 s, 0 busy loops beside them" in said
    assert said.endswith("3 times: b.py::test_b\n")

    calls.clear()
    assert repeat.main(arguments) == 1
    assert calls == []


@pytest.mark.slow
def test_each_file_runs_in_a_separate_pytest_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n", encoding="utf-8")
    run = repeat.run_file(path, number=4, file="it")
    assert (run.round, run.file, run.code) == (4, "it", 1)
    assert [name.rpartition("::")[2] for name in run.failed] == ["test_bad"]
    assert "----- round 4: " in capsys.readouterr().out
