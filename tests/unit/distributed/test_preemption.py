"""A loop with an Accelerator that gets a signal, without a launcher: where it stops, what it saves, and what the next start does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from echelon import Accelerator
from echelon.distributed import preemption, should_stop
from echelon.status import stop_barrier as hold
from echelon.status.stop_barrier import EXIT_CODE
from echelon.utils import ProjectConfiguration

EPOCHS, STEPS = 3, 6


def train(
    accelerator: Accelerator, at: Callable[[int, str], None], *, resume: tuple[Any, ...] | None = ()
) -> tuple[list[torch.Tensor], list[str]]:
    """Train, calling ``at`` with the step in each turn of a loop; return the weights, and what was done after each epoch."""
    torch.manual_seed(3)
    x = torch.arange(12.0)[:, None] / 12
    model: Any = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    data = TensorDataset(x, 2 * x)
    model, optimizer, loader, held_out = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05),
        DataLoader(data, batch_size=2, shuffle=True),
        DataLoader(data, batch_size=2),
    )
    if resume is not None:
        accelerator.resume(*resume)
    done = []
    for epoch in accelerator.epochs(EPOCHS):
        model.train()
        for a, b in loader:
            accelerator.backward(nn.functional.mse_loss(model(a), b))
            optimizer.step()
            optimizer.zero_grad()
            at(accelerator.progress.step, "train")
        model.eval()
        with torch.no_grad():
            for a, _ in held_out:
                model(a)
                at(accelerator.progress.step, "evaluate")
        done.append(f"epoch {epoch}")
    return [p.detach().clone() for p in model.parameters()], done


def signal_at(step: int, part: str) -> Callable[[int, str], None]:
    sent: list[int] = []

    def at(now: int, where: str) -> None:
        if (now, where) == (step, part) and not sent:
            sent.append(now)
            os.kill(os.getpid(), signal.SIGTERM)

    return at


def nothing(_step: int, _part: str) -> None:
    """Send no signal."""


def accelerator(folder: Path | None, **options: Any) -> Accelerator:
    project = ProjectConfiguration(folder, **options)
    return Accelerator(cpu=True, project_config=project, seed=7)


# In the last turn of a pass and in an evaluation the epoch goes on to its end.
@pytest.mark.parametrize(
    ("step", "part", "saved"), [(4, "train", 4), (6, "train", 6), (6, "evaluate", 6), (18, "evaluate", 18)]
)
def test_it_stops_where_resuming_loses_nothing(tmp_path: Path, step: int, part: str, saved: int) -> None:
    expected, all_done = train(accelerator(None), nothing, resume=None)
    options = {"automatic_checkpoint_naming": True}
    first = accelerator(tmp_path, **options)
    with pytest.raises(preemption.Preempted) as stop:
        train(first, signal_at(step, part))
    assert stop.value.code == EXIT_CODE == 143
    assert first.progress.step == saved
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [path.name for path in (tmp_path / "checkpoints").glob("checkpoint_*")] == ["checkpoint_0"]
    weights, done = train(accelerator(tmp_path, **options), nothing)
    assert all(map(torch.equal, weights, expected))
    assert done == all_done[saved // STEPS :]


def test_an_evaluation_longer_than_half_the_grace_period_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, is_led = [0.0], threading.Event()

    class Desk:
        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.read_positions = inner.read_positions

        def write_command(self, command: int) -> None:
            self._inner.write_command(command)
            if command >> hold._BOUNDARY_BITS == hold.StopCommand.TO_ANY:
                is_led.set()

    monkeypatch.setattr(preemption, "_GRACE_S", 100.0)
    monkeypatch.setattr(
        preemption,
        "BarrierCoordinator",
        lambda desk, grace_s: hold.BarrierCoordinator(Desk(desk), grace_s, clock=lambda: clock[0]),
    )
    begun: list[int] = []

    def at(step: int, part: str) -> None:
        if (step, part) == (12, "evaluate"):
            if not begun:
                os.kill(os.getpid(), signal.SIGUSR1)
            begun.append(step)
            if len(begun) == 3:
                assert not is_led.is_set()
                clock[0] = 51.0
                assert is_led.wait(60)

    with pytest.raises(preemption.Preempted):
        train(accelerator(tmp_path), at, resume=(tmp_path / "state",))
    assert len(begun) == 3
    expected, _ = train(accelerator(None), nothing, resume=None)
    weights, done = train(accelerator(None), nothing, resume=(tmp_path / "state",))
    assert all(map(torch.equal, weights, expected))
    assert done == ["epoch 2"]


def test_a_run_that_cannot_be_saved_ends_with_a_message(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(preemption.Preempted):
        train(accelerator(None), signal_at(3, "train"), resume=None)
    assert "the run ends after step 3 with exit code 143 without saving" in caplog.text


def test_without_resume_a_checkpoint_is_saved_in_the_project_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(preemption.Preempted):
        train(accelerator(tmp_path), signal_at(3, "train"), resume=None)
    assert re.search(r"after step 3 .* saved \S*/preempted; resume\('\S*/preempted'\) continues from it", caplog.text)
    weights, _ = train(accelerator(None), nothing, resume=(tmp_path / "preempted",))
    assert all(map(torch.equal, weights, train(accelerator(None), nothing, resume=None)[0]))


def test_the_programs_signal_handler_is_kept(tmp_path: Path) -> None:
    came: list[int] = []
    before = [signal.signal(number, lambda number, _frame: came.append(number)) for number in preemption.SIGNALS]
    try:
        _, done = train(accelerator(tmp_path), signal_at(3, "train"), resume=None)
    finally:
        for number, handler in zip(preemption.SIGNALS, before):
            signal.signal(number, handler)
    assert came == [signal.SIGTERM]
    assert len(done) == EPOCHS


class _Pids(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return os.getpid()


def test_loader_workers_survive_a_signal_to_the_whole_job() -> None:
    with preemption.on_signals(None):
        loader = iter(DataLoader(_Pids(), batch_size=None, num_workers=1))
        pid = next(loader)
        os.kill(pid, signal.SIGUSR1)  # (torch keeps SIGTERM in its workers to itself)
        assert set(loader) == {pid}


def test_without_a_launcher_a_query_has_no_effect() -> None:
    assert not should_stop()


def test_the_example_of_the_document_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "preemption.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python preemption\n(.*?)```", page, re.DOTALL)
    example = example.replace("Accelerator(", "Accelerator(cpu=True, ")
    told = "        if accelerator.progress.step == 20: import os; os.kill(os.getpid(), 15)\n"
    printed = []
    for folder, program, ends in (
        ("whole", example, False),
        ("parts", example.replace("accelerator.print", told.lstrip("\n") + "accelerator.print"), True),
        ("parts", example, False),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(preemption.Preempted) if ends else nullcontext():
            exec(program, {})
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("48 steps, loss ")
    assert printed[1:] == ["", printed[0]]


ALONE = """
import os, signal, sys, time
from echelon.distributed import preemption
preemption._GRACE_S = 0.3
with preemption.on_signals(None):
    os.kill(os.getpid(), signal.SIGUSR1)
    if sys.argv[1] == "twice":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("manner", "code"), [("once", 143), pytest.param("twice", -15, marks=pytest.mark.soak)])
def test_a_process_without_a_boundary_ends_after_the_grace_period(manner: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, manner], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code
    assert (
        "not all ranks reached the same step within 0.3 s of the stop signal. The process exits with code 143"
        in done.stderr
    ) == (code > 0)


def test_no_thread_of_the_agreement_outlives_the_loop() -> None:
    agreement = preemption._StopAgreement()
    agreement.begin()
    assert agreement.is_pending
    agreement.end()
    assert "_lead" not in [frame.f_code.co_name for frame in _frames_of_all_threads()]
    ended = preemption._StopAgreement()
    ended.end()
    ended.begin()  # too late, in the thread that another rank has notified
    assert not ended.is_pending


def _frames_of_all_threads() -> list[FrameType]:
    found = []
    for frame in sys._current_frames().values():
        inner: FrameType | None = frame
        while inner is not None:
            found.append(inner)
            inner = inner.f_back
    return found
