"""What the launcher reads from the records of the ranks (launch/local/rank_errors.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.launch.local.rank_errors import read_answer, read_last_words

SCRIPT = """\
def step(x):
    for _ in range(2):
        x.backward()
    log(x)
for epoch in range(2):
    for x in loader:
        step(x)
        while True:
            pass
    evaluate()
def log(x):
    gather(x)
"""


def _write_answer(folder: Path, *frames: tuple[str, int]) -> Path:
    stack = [f'  File "{file}", line {line}, in f\n    text\n' for file, line in frames]
    content = {"call_site": None, "trains": True, "stack": stack, "threads": [], "collectives": {"groups": {}}}
    path = folder / "answer.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("lines", "loops"),
    [([7, 3], [2, 6, 5]), ([7, 4, 12], [6, 5]), ([9], [8, 6, 5]), ([10], [5]), ([5], []), ([11], [])],
)
def test_an_answer_holds_the_loops_around_the_lines_of_the_stack(
    lines: list[int], loops: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torch_file = "/env/site-packages/torch/nn/parallel/distributed.py"  # its loops are not those of the program
    found = read_answer(_write_answer(tmp_path, *((str(script), line) for line in lines), (torch_file, 1)))
    assert found is not None
    assert found.loops == tuple(f"{script}:{line}" for line in loops)


def test_the_loops_of_a_failed_rank_are_those_of_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    frames = [{"file": str(script), "line": line, "function": "f", "source": "", "user": True} for line in (7, 3)]
    record = {"time_ns": 1, "type": "RuntimeError", "message": "", "frames": frames, "chain": [], "where": "main"}
    (tmp_path / "error.json").write_text(json.dumps([{**record, "collectives": {"groups": {}}}]))
    found = read_last_words(tmp_path)
    assert found is not None
    assert found.loops == tuple(f"{script}:{line}" for line in (2, 6, 5))


@pytest.mark.parametrize("text", [None, "for x in\n", "\0"])
def test_a_script_that_cannot_be_parsed_has_no_loops(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    found = read_answer(_write_answer(tmp_path, (str(tmp_path / "train.py"), 1)))
    assert found is not None
    assert found.loops == ()
