"""What ``echelon verify`` shows: the first screen, its page and its command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main
from echelon.distributed.checks.finding import STAGES, Finding
from echelon.verify.command.layouts import Layout, parse_layouts
from echelon.verify.command.page import render_verification
from echelon.verify.command.run_layouts import LayoutRun, RunFailure, RunRequest
from echelon.verify.command.terminal_output import Palette, headline, render, shown_line
from echelon.verify.command.verification import LayoutResult, Verification, VerifyPlan
from echelon.verify.finding import Cell, Coverage, Verdict
from echelon.verify.trace import RecordingSettings
from tests.browser import CHROMIUM, Browser, open_browser


def _plan(script: Path, procs: str = "1,2,4", engines: str | None = "ddp") -> VerifyPlan:
    layouts = tuple(parse_layouts(procs, engines))
    return VerifyPlan(script=str(script), arguments=(), layouts=layouts, steps=2, folder=script.parent)


def _result(layout: Layout, verdict: Verdict) -> LayoutResult:
    return LayoutResult(
        layout=layout, outcome=verdict.result, num_updates=2, seconds=3.25, batch_factor=2, verdict=verdict
    )


def _cells(**different: int) -> list[Cell]:
    cells = []
    for update in range(2):
        for stage in STAGES[2:-1]:
            state: Any = "within rounding" if stage in ("forward", "backward") else "equal bits"
            state = "different" if different.get(stage, 99) <= update else state
            cells.append(Cell(update=update, stage=stage, state=state, largest=0.125, num_compared=3))
    return cells


SAME = Verdict(result="same", num_updates=2, world_size=2, cells=_cells())
BITS = Verdict(
    result="same", num_updates=2, world_size=1, cells=[Cell(update=0, stage="data", state="equal bits", num_compared=1)]
)


def _finding(script: Path, **options: Any) -> Finding:
    values: dict[str, Any] = {
        "update": 0,
        "stage": "backward",
        "what": "the gradients of 6 parameters differ",
        "tensors": ["layers.0.weight", "layers.0.bias", "head.weight", "head.bias", "embed.weight", "norm.weight"],
        "ranks": [0, 1],
        "difference": 0.3211,
        "measured": "layers.0.weight on 2 processes",
        "allowed": 1.1e-6,
        "cause": "loss averaged per rank",
        "why": "ranks hold 10 and 2 tokens, and the gradient is the mean of the ranks' means instead of the mean over all 12 tokens",
        "do": "pass num_items= to accelerator.backward",
        "line": f"{script}:2",
    }
    return Finding(**{**values, **options})


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import torch\nloss = F.cross_entropy(logits, labels)\n")
    return path


def _screen(found: Verification) -> str:
    return render(found, palette=Palette(), width=100)


def test_the_same_run_is_one_sentence_and_a_line_for_each_layout(script: Path) -> None:
    plan = _plan(script)
    verdicts = [BITS, SAME, SAME]
    found = Verification(plan=plan, layouts=tuple(map(_result, plan.layouts, verdicts)), seconds=9.0)
    assert _screen(found).splitlines() == [
        "The same run: 2 updates of train.py on 1, 2 and 4 processes train as one process.",
        "",
        "  1 process, ddp    same, bit for bit                         2 updates, 3.2 s",
        "  2 processes, ddp  same, within rounding (12% of the bound)  2 updates, 3.2 s",
        "  4 processes, ddp  same, within rounding (12% of the bound)  2 updates, 3.2 s",
    ]


def test_the_first_difference_is_shown_once_with_its_line_cause_and_remedy(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    plan = _plan(script)
    also = Finding(
        update=1,
        stage="buffers",
        what="the running mean of norm differs",
        cause="batch statistics per rank",
        why="each rank normalizes by its own samples",
        do="convert the model with SyncBatchNorm.convert_sync_batchnorm",
    )
    verdict = Verdict(result="different", num_updates=2, world_size=2, finding=_finding(script), also=[also])
    found = Verification(plan=plan, layouts=tuple(map(_result, plan.layouts, [BITS, verdict, verdict])), seconds=9.0)
    assert _screen(found).splitlines() == [
        "Not the same run: 2 of 3 layouts differ from one process.",
        "",
        "  1 process, ddp    same, bit for bit                         2 updates, 3.2 s",
        "  2 processes, ddp  differs: update 0, backward               2 updates, 3.2 s",
        "  4 processes, ddp  differs: update 0, backward               2 updates, 3.2 s",
        "",
        "First difference on 2 processes, ddp (the same on 4 processes, ddp)",
        "  what:    the gradients of 6 parameters differ",
        "  where:   update 0, backward, ranks 0 and 1",
        "  tensors: layers.0.weight, layers.0.bias, head.weight and 3 others",
        "  size:    relative difference of layers.0.weight on 2 processes: 0.32; bound for rounding errors:",
        "           1.1e-06",
        "  line:    train.py:2: loss = F.cross_entropy(logits, labels)",
        "  cause:   loss averaged per rank: ranks hold 10 and 2 tokens, and the gradient is the mean of the",
        "           ranks' means instead of the mean over all 12 tokens",
        "  do:      pass num_items= to accelerator.backward",
        "",
        "Another difference, which does not follow from the first",
        "  what:    the running mean of norm differs",
        "  where:   update 1, buffers",
        "  cause:   batch statistics per rank: each rank normalizes by its own samples",
        "  do:      convert the model with SyncBatchNorm.convert_sync_batchnorm",
    ]


def test_an_error_is_shown_once_for_all_layouts_that_raise_it(script: Path) -> None:
    plan = _plan(script, "2,4")
    failure = RunFailure(
        what="rank 0 failed first: ValueError: bad", details=("  where: rank 0 of 2",), do="fix it", output="/tmp/o.txt"
    )
    failed = [
        LayoutResult(layout=one, outcome="failed", num_updates=0, seconds=1.0, failure=failure) for one in plan.layouts
    ]
    found = Verification(plan=plan, layouts=tuple(failed), seconds=2.0)
    assert _screen(found).splitlines() == [
        "Could not verify 2 of 2 layouts.",
        "",
        "  2 processes, ddp  could not run                             0 updates, 1.0 s",
        "  4 processes, ddp  could not run                             0 updates, 1.0 s",
        "",
        "2 processes, ddp (the same on 4 processes, ddp): rank 0 failed first: ValueError: bad",
        "  where: rank 0 of 2",
        "  do:      fix it",
        "  output:  /tmp/o.txt",
    ]
    request = RunRequest(
        name="one process",
        layout=Layout(num_processes=1),
        script=str(script),
        arguments=(),
        folder=script.parent,
        run=RecordingSettings(steps=2),
    )
    run = LayoutRun(request=request, num_updates=0, seconds=1.0, failure=failure)
    screen = _screen(Verification(plan=plan, layouts=(), seconds=1.0, reference_failure=run))
    assert screen.startswith(
        "Could not run: train.py fails on one process.\n\none process: rank 0 failed first: ValueError: bad\n"
    )


def test_what_was_not_compared_is_said(script: Path) -> None:
    plan = _plan(script, "2")
    missing = "no local gradients under this engine"
    verdict = Verdict(
        result="same",
        num_updates=2,
        world_size=2,
        cells=_cells(),
        coverage=[
            Coverage(stage="load", num_compared=0, missing=["no checkpoint was loaded"]),
            Coverage(
                stage="backward",
                num_compared=0,
                missing=[missing, "outputs of a: other shape", "outputs of b: other shape"],
            ),
            Coverage(stage="clip", num_compared=0, missing=["gradients are not clipped"]),
            Coverage(stage="buffers", num_compared=4, missing=["statistics of norm"]),
        ],
        notes=["The masks of two dropout layers are not compared."],
    )
    found = Verification(
        plan=plan,
        layouts=(_result(plan.layouts[0], verdict),),
        seconds=2.0,
        float64_failure=RunFailure(what="RuntimeError: not implemented for 'Double'"),
    )
    assert _screen(found).splitlines()[4:] == [
        "The reference run fails in float64 (RuntimeError: not implemented for 'Double'), so the bounds for",
        "rounding errors are computed from the dtype and the number of additions.",
        "Not compared: backward: no local gradients under this engine",
        "Not compared: backward: outputs of a and 1 other: other shape",
        "Not compared: buffers: statistics of norm",
        "The masks of two dropout layers are not compared.",
        "Not compared: load (no checkpoint was loaded); clip (gradients are not clipped).",
    ]


def test_a_script_that_does_not_repeat_itself_is_not_accused(script: Path) -> None:
    plan = _plan(script, "2")
    verdict = Verdict(result="different", num_updates=1, world_size=2, finding=_finding(script))
    found = Verification(
        plan=plan,
        layouts=(_result(plan.layouts[0], verdict),),
        seconds=2.0,
        repeated=Finding(update=0, stage="data", what="the samples differ"),
    )
    screen = _screen(found)
    assert screen.startswith(
        "Not comparable: train.py does not repeat itself. Two runs on one process already differ.\n"
    )
    assert "  what:    the samples differ\n" in screen
    assert "cross_entropy" not in screen


def test_control_characters_and_colours(script: Path) -> None:
    plan = _plan(script, "2")
    verdict = Verdict(
        result="different",
        num_updates=1,
        world_size=2,
        finding=_finding(script, what="a\x1b[2Jb", line="", tensors=["w\n"]),
    )
    found = Verification(plan=plan, layouts=(_result(plan.layouts[0], verdict),), seconds=2.0)
    assert "\x1b" not in _screen(found)
    coloured = render(found, palette=Palette.for_terminal(), width=80)
    assert coloured.startswith(
        "\x1b[1;31mNot the same run: training on 2 processes, ddp differs from one process.\x1b[0m\n"
    )
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == render(found, palette=Palette(), width=80)


# The page.


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (make browser)")
    with open_browser() as browser:
        yield browser


def test_the_page_has_a_row_for_each_update_and_a_column_for_each_stage(
    script: Path, browser: Browser, tmp_path: Path
) -> None:
    plan = _plan(script, "1,2")
    finding = _finding(script, what="<script>alert(1)</script>")
    verdict = Verdict(
        result="different",
        num_updates=2,
        world_size=2,
        finding=finding,
        cells=_cells(backward=0, optimizer=0),
        notes=["limited"],
    )
    found = Verification(plan=plan, layouts=tuple(map(_result, plan.layouts, [SAME, verdict])), seconds=9.0)
    page = tmp_path / "page.html"
    page.write_text(render_verification(found), encoding="utf-8")
    browser.open(page)
    assert browser.problems == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.run("document.querySelector('h1').innerText") == headline(found)
    table = "document.querySelectorAll('#\\\\32 -ddp .steps tr')"
    assert browser.run(f"[...{table}[0].cells].map(c => c.innerText)") == ["update", *STAGES[2:-1]]
    assert browser.run(f"[...{table}].map(r => r.cells[0].innerText)") == ["update", "0", "1"]
    stages = list(STAGES[2:-1])
    states = ["diff" if s in ("backward", "optimizer") else "near" if s == "forward" else "bits" for s in stages]
    states[stages.index("backward")] += " first"
    assert browser.run(f"[...{table}[1].cells].slice(1).map(c => c.className)") == states
    assert finding.what in browser.run("document.querySelector('#\\\\32 -ddp .finding').innerText")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    browser.resize(390, 800)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.prefer(is_dark=True)
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light


# The command line.


def _run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *argv])
    assert isinstance(ended.value.code, int)
    return (ended.value.code, *capsys.readouterr())


def test_flags_may_follow_the_script_from_procs_on(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans: list[VerifyPlan] = []

    def fake(plan: VerifyPlan, record: Any) -> Verification:
        plans.append(plan)
        return Verification(plan=plan, layouts=tuple(_result(one, SAME) for one in plan.layouts), seconds=1.0)

    monkeypatch.setattr("echelon.verify.command.verification.verify", fake)
    code, out, _ = _run(
        ["--steps=7", str(script), "--lr", "1", "--steps", "9", "--procs", "2", "--engines=ddp"], capsys
    )
    assert (code, out.partition(":")[0]) == (0, "The same run")
    assert (plans[0].steps, plans[0].arguments) == (7, ("--lr", "1", "--steps", "9"))
    assert [one.name for one in plans[0].layouts] == ["2 processes, ddp"]
    page = tmp_path / "page.html"
    code, out, _ = _run(["--json", "--html", str(page), "--procs", "2", str(script), "--engine", "x"], capsys)
    assert json.loads(out)["result"] == "same"
    assert plans[1].arguments == ("--engine", "x")
    assert page.read_text().startswith("<!doctype html>")
    assert not any(plan.folder.exists() for plan in plans)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["nothing.py"], "nothing.py is not a file"),
        (["--against", "a.py", "--against_run", "b", "SCRIPT"], "a.py is not a file"),
        (["--against", "SCRIPT", "--against_run", "b", "SCRIPT"], "--against and --against_run are mutually exclusive"),
        (["--resume_after", "20", "SCRIPT"], "the run ends after 20 steps"),
        (["--resume_args", "--go", "SCRIPT"], "--resume_args is set without --resume_after"),
        (["--procs", "x", "SCRIPT"], "'x' is not a number of processes"),
        (["--keep", "FOLDER", "SCRIPT"], "is not empty"),
    ],
)
def test_a_wrong_command_line_exits_with_2(
    argv: list[str], text: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"SCRIPT": str(script), "FOLDER": str(script.parent)}
    code, _, error = _run([places.get(word, word) for word in argv], capsys)
    assert (code, text in error) == (2, True)
    assert "  do:    " in error


@pytest.mark.parametrize("name", ["verify", "tune"])
def test_a_syntax_error_names_the_line_of_the_script(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text("a = 1\nb = )\n")
    with pytest.raises(SystemExit) as end:
        main([name, str(path)])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert f"  where: {path}:2: b = )" in error
    assert "  do:    fix this line" in error


@pytest.mark.parametrize(("source", "is_said"), [("Trainer(model).train()", True), ("model.train()", False)])
def test_a_line_that_only_starts_the_trainer_is_said_to_have_no_code_of_the_script(
    source: str, is_said: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(f"{source}\n")
    shown = shown_line(f"{tmp_path / 'train.py'}:1")
    assert shown.endswith("(the Trainer runs this stage; no code of the script takes part in it)") == is_said
    assert source in shown
