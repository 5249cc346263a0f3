"""``echelon verify``: which runs it starts, which reference a layout is compared with, and how runs that fail are reported."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.base.errors import ConfigError, UsageError
from echelon.distributed.checks.finding import Finding
from echelon.distributed.checks.sketch import Sketch
from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.verify.command.layouts import Layout, parse_layouts
from echelon.verify.command.run_layouts import LayoutRun, LayoutRunner, RunFailure, RunLimits, RunRequest
from echelon.verify.command.verification import Verification, VerifyPlan, verify
from echelon.verify.finding import Verdict
from echelon.verify.trace import (
    RUN_FILE,
    VERSION,
    Batch,
    Model,
    OptimizerStep,
    RecordingSettings,
    Row,
    SketchedTensors,
    Trace,
    TraceWriter,
)


def test_layouts_are_numbers_of_processes_times_engines() -> None:
    names = [layout.name for layout in parse_layouts("4, 1,2,2", "ddp,zero1")]
    assert names == [
        f"{number}, {engine}" for number in ("1 process", "2 processes", "4 processes") for engine in ("ddp", "zero1")
    ]
    (one,) = parse_layouts("2", None)
    assert (one.name, one.slug, one.flags) == ("2 processes", "2", ["--num_machines", "1", "--num_processes", "2"])
    assert parse_layouts("2", "fsdp2")[0].flags[-2:] == ["--engine", "fsdp2"]


@pytest.mark.parametrize(
    ("procs", "engines", "text"),
    [
        ("two", None, "'two' is not a number of processes"),
        ("0", None, "'0' is not a number of processes"),
        ("", None, "--num_processes is empty"),
        ("2", "fsdp3", "unknown engine 'fsdp3'\n  do:    did you mean 'fsdp2'?"),
    ],
)
def test_a_wrong_layout_is_an_error(procs: str, engines: str | None, text: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=text):
        parse_layouts(procs, engines)


# Runs of a script that trains on the samples 0, 1, 2, ... in batches of 4 per process.


def _write(
    request: RunRequest, *, batch_size: int = 4, parity: str = "off", engine: str = "ddp", value: float = 1.0
) -> None:
    size = request.layout.num_processes
    for rank in range(size):
        writer = TraceWriter(request.folder, rank)
        writer.add(request.run)
        writer.add(
            Model(
                model=0,
                parameters=["w"],
                dtypes=["float32"],
                parity=parity,
                engine=engine,
            )
        )
        for update in range(request.run.first_update, request.run.first_update + request.run.steps):
            num_rows = batch_size * request.run.batch_factor
            rows = [Row(whole=i, prefix=i) for i in range(num_rows)]
            writer.add(Batch(update=update, micro_step=0, source="loader", rows=rows))
            writer.add(OptimizerStep(update=update, lrs=[0.1], settings=[{}], group_of={"0:w": 0}))
            sketch = Sketch(
                projection=np.full(32, value), square_sum=value, bits=int(value * 1e6), num_elements=1, num_nonfinite=0
            )
            writer.add(SketchedTensors(content="weights", update=update, names=["0:w"], sketches=[sketch]))
        writer.close()


class _Runs:
    """Stands in for the recorder: writes traces at once."""

    def __init__(self, write: Callable[[RunRequest], RunFailure | None]) -> None:
        self._write = write
        self.requests: list[RunRequest] = []

    def record(self, request: RunRequest) -> LayoutRun:
        self.requests.append(request)
        failure = self._write(request)
        return LayoutRun(request=request, num_updates=0 if failure else request.run.steps, seconds=1.0, failure=failure)

    @property
    def names(self) -> list[str]:
        return [request.name for request in self.requests]


def _plan(folder: Path, procs: str = "1,2", engines: str | None = None, **options: Any) -> VerifyPlan:
    return VerifyPlan(
        script="train.py",
        arguments=("--lr", "1"),
        layouts=tuple(parse_layouts(procs, engines)),
        steps=3,
        folder=folder,
        **options,
    )


def _compare_weights(layout: Trace, reference: Trace, float64: Trace | None = None, *, options: Any) -> Verdict:
    """Compare the bits of the weights; without ``is_bitwise``, differences below 0.1 are rounding."""
    assert (float64 is None) is options.is_bitwise
    mine, other = ([e for e in trace.ranks[0] if isinstance(e, SketchedTensors)] for trace in (layout, reference))
    allowed = 0.0 if options.is_bitwise else 0.1
    for a, b in zip(mine, other, strict=True):
        if abs(a.sketches[0].square_sum - b.sketches[0].square_sum) > allowed:
            finding = Finding(update=a.update, stage="optimizer", what="weights differ", tensors=["w"])
            return Verdict(result="different", num_updates=a.update, world_size=len(layout.ranks), finding=finding)
    return Verdict(result="same", num_updates=len(mine), world_size=len(layout.ranks))


def test_each_layout_is_compared_with_one_process_that_takes_the_samples_of_all_ranks(tmp_path: Path) -> None:
    runs = _Runs(lambda request: _write(request, value=1.0 + 0.01 * request.layout.num_processes))
    found = verify(_plan(tmp_path, "1,2,4"), runs.record, compare=_compare_weights)
    assert runs.names == [
        "reference (one process)",
        "1 process",
        "2 processes",
        "reference, 2 batches of the loader in one",
        "reference in float64",
        "4 processes",
        "reference, 4 batches of the loader in one",
        "reference in float64",
    ]
    assert [one.outcome for one in found.layouts] == ["same"] * 3
    assert [one.batch_factor for one in found.layouts] == [1, 2, 4]
    assert [(r.run.batch_factor, r.run.is_float64) for r in runs.requests if r.name.startswith("reference")] == [
        (1, False),
        (2, False),
        (2, True),
        (4, False),
        (4, True),
    ]
    assert found.exit_code == 0


def test_a_reference_is_run_once_for_all_engines(tmp_path: Path) -> None:
    runs = _Runs(lambda request: _write(request, value=1.0 + 0.01 * request.layout.num_processes))
    verify(_plan(tmp_path, "2", "ddp,zero1,fsdp2"), runs.record, compare=_compare_weights)
    assert runs.names == [
        "reference (one process)",
        "2 processes, ddp",
        "reference, 2 batches of the loader in one",
        "reference in float64",
        "2 processes, zero1",
        "2 processes, fsdp2",
    ]


def test_engines_that_the_script_does_not_use_are_one_layout(tmp_path: Path) -> None:
    runs = _Runs(lambda request: _write(request, engine=""))
    found = verify(_plan(tmp_path, "2", "ddp,zero1"), runs.record, compare=_compare_weights)
    assert runs.names == ["reference (one process)", "2 processes, ddp", "reference, 2 batches of the loader in one"]
    assert [(one.layout.engine, one.outcome, one.is_copy) for one in found.layouts] == [
        ("ddp", "same", False),
        ("zero1", "same", True),
    ]


def test_no_batches_are_merged_where_the_global_batch_does_not_depend_on_the_processes(tmp_path: Path) -> None:
    runs = _Runs(lambda request: _write(request, batch_size=4 // request.layout.num_processes))
    found = verify(_plan(tmp_path, "2,4"), runs.record, compare=_compare_weights)
    assert runs.names == ["reference (one process)", "2 processes", "4 processes"]
    assert [(one.outcome, one.batch_factor) for one in found.layouts] == [("same", 1), ("same", 1)]


@pytest.mark.parametrize("parity", ["exact", "bitwise"])
def test_samples_that_fill_up_a_global_batch_merge_no_batches(tmp_path: Path, parity: str) -> None:
    """3 processes share the 4 samples of a batch as 2 each; those that fill it up have no weight."""
    sizes = {1: 4, 3: 2}
    runs = _Runs(lambda one: _write(one, batch_size=sizes[one.layout.num_processes], parity=parity))
    found = verify(_plan(tmp_path, "3"), runs.record, compare=_compare_weights)
    assert [(one.outcome, one.batch_factor) for one in found.layouts] == [("same", 1)]


def test_updates_that_no_whole_number_of_batches_makes_equal_are_not_comparable(tmp_path: Path) -> None:
    runs = _Runs(lambda request: _write(request, batch_size=4 if request.layout.num_processes == 1 else 3))
    found = verify(_plan(tmp_path, "2"), runs.record, compare=_compare_weights)
    assert found.layouts[0].outcome == "not comparable"
    assert found.layouts[0].verdict is not None
    assert "update 0 has 6 samples on 2 processes and 4 on one process" in found.layouts[0].verdict.reason
    assert found.exit_code == 2


def test_bitwise_parity_gets_no_tolerance(tmp_path: Path) -> None:
    def write(request: RunRequest) -> None:
        size = request.layout.num_processes
        _write(request, batch_size=4 // size, parity="bitwise", value=1.0 + 0.01 * size)

    runs = _Runs(write)
    found = verify(_plan(tmp_path, "2"), runs.record, compare=_compare_weights)
    assert found.layouts[0].outcome == "different"
    assert "reference in float64" not in runs.names


def test_a_difference_is_an_error_only_if_the_script_repeats_itself(tmp_path: Path) -> None:
    def unseeded(request: RunRequest) -> None:
        _write(request, value=float(len(runs.requests)))

    runs = _Runs(unseeded)
    found = verify(_plan(tmp_path, "2"), runs.record, compare=_compare_weights)
    assert runs.names[-1] == "reference, repeated"
    assert found.repeated is not None
    assert found.repeated.stage == "optimizer"
    assert found.exit_code == 2
    runs = _Runs(lambda request: _write(request, value=float(request.layout.num_processes)))
    found = verify(_plan(tmp_path, "2"), runs.record, compare=_compare_weights)
    assert (found.repeated, found.exit_code) == (None, 1)


def test_a_script_that_fails_on_one_process_is_run_on_no_other_layout(tmp_path: Path) -> None:
    runs = _Runs(lambda request: RunFailure(what="rank 0 failed first: ValueError: no"))
    found = verify(_plan(tmp_path), runs.record, compare=_compare_weights)
    assert runs.names == ["reference (one process)"]
    assert found.exit_code == 2
    assert found.reference_failure is not None


def test_a_layout_that_fails_does_not_hide_the_others(tmp_path: Path) -> None:
    def write(request: RunRequest) -> RunFailure | None:
        if request.layout.engine == "zero1":
            return RunFailure(what="out of memory")
        _write(request)
        return None

    found = verify(_plan(tmp_path, "2", "zero1,ddp"), _Runs(write).record, compare=_compare_weights)
    assert [one.outcome for one in found.layouts] == ["failed", "same"]
    assert found.exit_code == 2


def test_a_reference_that_fails_in_float64_is_told(tmp_path: Path) -> None:
    def write(request: RunRequest) -> RunFailure | None:
        if request.run.is_float64:
            return RunFailure(what="RuntimeError: not implemented for 'Double'")
        _write(request, value=1.0 + 0.01 * request.layout.num_processes)
        return None

    def compare(*traces: Trace | None, options: Any) -> Verdict:
        result = "different" if options.is_bitwise else "same"
        return Verdict(result=result, num_updates=3, world_size=2)  # type: ignore[arg-type]

    found = verify(_plan(tmp_path, "2"), _Runs(write).record, compare=compare)
    assert found.exit_code == 0
    assert found.float64_failure is not None


def test_a_resumed_layout_is_compared_as_one_run(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "2", resume_after=2, resume_arguments=("--resume",))
    compared: list[Trace] = []

    def compare(layout: Trace, *others: Trace, options: Any) -> Verdict:
        assert options.is_resumed
        compared.append(layout)
        return Verdict(result="same", num_updates=3, world_size=2)

    runs = _Runs(_write)
    verify(plan, runs.record, compare=compare)
    first, second = (one for one in runs.requests if one.name.startswith("2 processes"))
    assert (first.run, first.arguments) == (RecordingSettings(steps=2), ("--lr", "1"))
    assert (second.run, second.arguments) == (RecordingSettings(steps=1, first_update=2), ("--resume",))
    updates = [event.update for event in compared[0].ranks[1] if isinstance(event, OptimizerStep)]
    assert updates == [0, 1, 2]


def test_a_hang_after_a_resume_shows_the_difference_before_it(tmp_path: Path) -> None:
    """What both parts have recorded until then is compared as a resumed run that has failed."""

    def write(request: RunRequest) -> RunFailure | None:
        _write(request)
        return RunFailure(what="not finished after 20 s") if request.run.first_update else None

    def compare(layout: Trace, *others: Trace, options: Any) -> Verdict:
        if len(layout.ranks) == 1:  # the reference, repeated
            return Verdict(result="same", num_updates=3, world_size=1)
        assert (options.has_failed, options.is_resumed) == (True, True)
        updates = [event.update for event in layout.ranks[1] if isinstance(event, OptimizerStep)]
        assert updates == [0, 1, 2]
        finding = Finding(update=2, stage="optimizer", what="w differs")
        return Verdict(result="different", num_updates=2, world_size=2, finding=finding)

    plan = _plan(tmp_path, "2", resume_after=2, resume_arguments=("--resume",))
    (found,) = verify(plan, _Runs(write).record, compare=compare).layouts
    assert (found.outcome, found.phase) == ("different", "after the resume")
    assert found.failure is not None


def test_a_recorded_reference_is_used_without_running_anything_else(tmp_path: Path) -> None:
    first = _Runs(lambda request: _write(request, value=1.0 + 0.01 * request.layout.num_processes))
    verify(_plan(tmp_path / "kept", "2"), first.record, compare=_compare_weights)
    runs = _Runs(first._write)
    plan = _plan(tmp_path / "new", "2", against_run=tmp_path / "kept")
    assert verify(plan, runs.record, compare=_compare_weights).exit_code == 0
    assert runs.names == ["2 processes"]
    found = verify(_plan(tmp_path / "four", "4", against_run=tmp_path / "kept"), runs.record, compare=_compare_weights)
    assert found.layouts[0].verdict is not None
    assert "the recorded run has 1, 2" in found.layouts[0].verdict.reason
    with pytest.raises(UsageError, match="contains no recorded run"):
        verify(_plan(tmp_path, "2", against_run=tmp_path / "empty"), runs.record, compare=_compare_weights)


def test_a_reference_of_another_version_is_refused(tmp_path: Path) -> None:
    runs = _Runs(lambda request: _write(request, value=1.0))
    verify(_plan(tmp_path / "kept", "1,2"), runs.record, compare=_compare_weights)
    plan = _plan(tmp_path / "new", "2", against_run=tmp_path / "kept")
    for path in (tmp_path / "kept").glob("reference-*/rank_0.trace.jsonl"):
        text = path.read_text(encoding="utf-8")
        assert f'"version":{VERSION}' in text
        path.write_text(text.replace(f'"version":{VERSION}', '"version":1'), encoding="utf-8")
    with pytest.raises(UsageError, match=rf"another version of echelon \(format 1, this one is {VERSION}\)") as error:
        verify(plan, runs.record, compare=_compare_weights)
    assert "record it again with this version" in str(error.value)


# The recorder itself, with a program that stands in for the launcher.


def _recorder(tmp_path: Path, program: str, *, timeout_s: float = 20.0, **options: Any) -> LayoutRunner:
    path = tmp_path / "launcher.py"
    path.write_text(textwrap.dedent(program))
    limits = RunLimits(seed=3, timeout_s=timeout_s, num_threads=1)
    return LayoutRunner(
        limits, options.pop("interrupts", Interrupts()), start=(sys.executable, "-S", str(path)), **options
    )


def _request(tmp_path: Path, **options: Any) -> RunRequest:
    layout = Layout(num_processes=2, engine="ddp")
    return RunRequest(
        name="2",
        layout=layout,
        script="train.py",
        arguments=("--out", "o/{layout}"),
        folder=tmp_path / "run",
        run=RecordingSettings(steps=3, **options),
    )


_WRITES = """
    import pathlib, sys
    folder = pathlib.Path(sys.argv[sys.argv.index("echelon.verify.child") + 1])
    lines = ['{"kind":"optimizer_step","update":%d,"lrs":[0.1]}\\n' % update for update in range(3)]
    (folder / "rank_0.trace.jsonl").write_text("".join(lines) + '{"kind":"optimi')
    print(" ".join(sys.argv[1:]))
"""


def test_a_run_is_started_with_echelon_launch(tmp_path: Path) -> None:
    counts: list[int] = []
    recorder = _recorder(tmp_path, _WRITES, on_update=lambda request, count: counts.append(count))
    run = recorder.record(_request(tmp_path, is_float64=True, batch_factor=2, first_update=0))
    assert (run.failure, run.num_updates, counts[-1]) == (None, 3, 3)
    words = (tmp_path / "run" / "output.txt").read_text().split()
    assert words[:2] == ["launch", "--cpu"]
    assert "--num_processes 2 --engine ddp -m echelon.verify.child" in " ".join(words)
    assert words[words.index("echelon.verify.child") + 1 :] == [str(tmp_path / "run"), "train.py", "--out", "o/2-ddp"]
    expected = RecordingSettings(steps=3, is_float64=True, batch_factor=2, seed=3, stacks_after_s=17.0)
    assert json.loads((tmp_path / "run" / RUN_FILE).read_text()) == asdict(expected)


def test_the_launchers_report_of_a_failed_run_is_shown_once(tmp_path: Path) -> None:
    program = """
        print("Traceback (most recent call last):\\n  ...\\nValueError: bad\\nTraceback (most recent call last):\\nValueError: bad")
        print("echelon: note: something else")
        print("echelon: rank 1 failed first: ValueError: bad\\n  others: rank 0 failed with the same error")
        print("  where: rank 1 of 2\\n         train.py:7 in <module>: main()")
        print("         /x/echelon/verify/child.py:80 in main: runpy.run_path()")
        print("  do:    use x.full_tensor()\\n  logs:  above; --log_dir DIR")
        raise SystemExit(1)
    """
    run = _recorder(tmp_path, program).record(_request(tmp_path))
    assert run.failure == RunFailure(
        what="rank 1 failed first: ValueError: bad",
        details=(
            "  others: rank 0 failed with the same error",
            "  where: rank 1 of 2",
            "         train.py:7 in <module>: main()",
        ),
        do="use x.full_tensor()",
        output=str(tmp_path / "run" / "output.txt"),
    )


def test_a_failure_without_a_report_shows_the_end_of_the_output(tmp_path: Path) -> None:
    run = _recorder(tmp_path, "print('a\\x1bb'); raise SystemExit(7)").record(_request(tmp_path))
    assert run.failure is not None
    assert run.failure.what == "the processes exited with code 7; the end of their output:"
    assert run.failure.details == ("a\\x1bb",)


def test_a_script_without_a_step_is_a_failure(tmp_path: Path) -> None:
    run = _recorder(tmp_path, "").record(_request(tmp_path))
    assert run.failure is not None
    assert run.failure.what == "the script ended without an optimizer step"


def test_a_run_that_takes_too_long_says_where_each_rank_is(tmp_path: Path) -> None:
    program = """
        import pathlib, sys, time
        folder = pathlib.Path(sys.argv[sys.argv.index("echelon.verify.child") + 1])
        step = '{"kind":"optimizer_step","update":0,"lrs":[0.1]}\\n'
        (folder / "rank_0.trace.jsonl").write_text(step + '{"kind":"loss","update":1}\\n')
        (folder / "rank_1.trace.jsonl").write_text(step)
        (folder / "rank_1.stacks").write_text(
            'Timeout!\\nThread 0x1 (most recent call first):\\n  File "/a/other.py", line 1 in f\\n\\n'
            'Thread 0x2 (most recent call first):\\n  File "/v/site-packages/torch/x.py", line 9 in wait\\n'
            '  File "/home/me/train.py", line 31 in main\\n  File "/home/me/train.py", line 40 in <module>\\n'
        )
        time.sleep(60)
    """
    run = _recorder(tmp_path, program, timeout_s=2.0).record(_request(tmp_path))
    assert run.failure is not None
    assert run.failure.what == "not finished after 2 s: 1 of 3 updates recorded"
    assert run.failure.details == (
        "rank 0: last recorded: loss of update 1",
        "rank 1: last recorded: optimizer step of update 0; now at /home/me/train.py:31 in main",
    )
    assert "--timeout 4" in run.failure.do


def test_a_signal_ends_the_run(tmp_path: Path) -> None:
    interrupts = Interrupts()
    interrupts.hold()
    interrupts.on_signal(2, None)
    with pytest.raises(Interrupted):
        _recorder(tmp_path, "import time; time.sleep(60)", interrupts=interrupts).record(_request(tmp_path))


def test_the_results_as_json(tmp_path: Path) -> None:
    runs = _Runs(lambda request: _write(request, value=float(request.layout.num_processes)))
    found: Verification = verify(_plan(tmp_path, "2"), runs.record, compare=_compare_weights)
    values = found.as_json()
    assert (values["format"], values["version"], values["result"]) == ("echelon-verify", 1, "different")
    (layout,) = values["layouts"]
    assert (layout["num_processes"], layout["engine"], layout["result"], layout["batch_factor"]) == (
        2,
        None,
        "different",
        2,
    )
    assert layout["verdict"]["finding"]["stage"] == "optimizer"
