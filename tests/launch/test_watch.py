"""``echelon watch``: what a person sees in a terminal while ranks run, lag and stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from echelon.report.live_run import LiveRun
from echelon.report.web_server import WebServer
from echelon.status.board import Board, BoardReader
from tests.browser import CHROMIUM, open_browser
from tests.launch.conftest import Command
from tests.terminal_screen import TerminalScreen

ECHELON = [sys.executable, "-m", "echelon"]

# A rank as the launcher sees it, without torch: it notes a step every 20 ms, and a heartbeat every 0.1 s.
RANK = """
import os, sys, time
from echelon.status.board import Doing, Phase, Slot, StatusNote, StepPart, Times, Watch
path, index = sys.argv[1:]
slot, begun, step = Slot(path, int(index)), time.monotonic_ns(), 0
while True:
    now, step = time.monotonic_ns(), step + 1
    own, waits = (18, 2) if index == "1" else (4, 16)
    spent = [0, own * step * 1_000_000, 0, waits * step * 1_000_000, 0, 0, 0, 0]
    slot.note(StatusNote(now, step, step, 7, Phase.TRAIN, False, "all_reduce", "float32[4]", "", "train.py"))
    slot.times(Times(begun, now, -1, step, StepPart.FORWARD, tuple(spent)))
    doing = Doing.NOTHING if index == "1" else Doing.COMMUNICATES
    if step % 5 == 1:
        slot.watch(Watch(now, os.getpid(), step, step, doing, 0, 7, "train.py"))
    time.sleep(0.02)
"""


@pytest.fixture
def fake_run(tmp_path: Path) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
    """A run's folder and two processes that write to its board."""
    board = Board(2, folder=str(tmp_path))
    (tmp_path / "run-1" / "attempt_0" / "rank_0").mkdir(parents=True)
    (tmp_path / "run-1" / "attempt_0" / "rank_1").mkdir()
    facts = {"version": 1, "run_id": "run-1", "outcome": "running", "pid": os.getpid(), "board": board.path}
    machine = {"host": socket.gethostname()}
    counts = {"num_processes": 2, "num_machines": 1, "num_restarts": 0, "began": time.time(), "ended": None}
    (tmp_path / "run-1" / "run.json").write_text(json.dumps({**facts, **counts, "machine": machine}))
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, board.path, str(i)]) for i in range(2)]
    try:
        deadline = time.monotonic() + 20
        while not all(board.watch(i) and (note := board.note(i)) and note.step > 2 for i in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield tmp_path, ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        board.remove()


@pytest.mark.slow
def test_a_slow_rank_and_then_a_stopped_rank_are_seen(
    fake_run: tuple[Path, list[subprocess.Popen[bytes]]],
) -> None:
    folder, ranks = fake_run
    with TerminalScreen([*ECHELON, "watch", str(folder)]) as screen:
        screen.wait_for(lambda lines: any(re.match(r" +1 .*slow: forward 18", line) for line in lines), timeout_s=20)
        ranks[0].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        lines = screen.wait_for(
            lambda lines: any(re.match(r" +0 .*stopped", line) for line in lines) and lines, timeout_s=2
        )
        assert time.monotonic() - stopped < 2
        ranks[0].send_signal(signal.SIGCONT)
    header = next(i for i, line in enumerate(lines) if line.strip().startswith("rank  step"))
    assert "stopped (SIGSTOP or a debugger)" in lines[header + 1]  # the stopped rank comes first
    assert "slow: forward 18 ms per step (median 11)" in lines[header + 2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("key", ["q", "\x03"])
def test_q_and_ctrl_c_close_the_view_and_restore_the_terminal(
    key: str, fake_run: tuple[Path, list[subprocess.Popen[bytes]]]
) -> None:
    folder, _ranks = fake_run
    with TerminalScreen([*ECHELON, "watch", str(folder)]) as screen:
        lines = screen.wait_for(lambda lines: any("2 processes" in line for line in lines) and lines, timeout_s=20)
        assert "q closes this view; the run goes on" in lines
        assert not screen.is_line_mode()
        if key == "q":
            screen.press("xq")  # other keys do nothing
        else:
            screen.process.send_signal(signal.SIGINT)  # the terminal sends it only to processes that it controls
        assert screen.process.wait(10) == 0
        assert screen.is_line_mode()
        assert any("2 processes" in line for line in screen.display())  # the last state stays


def test_the_view_needs_no_keyboard(fake_run: tuple[Path, list[subprocess.Popen[bytes]]]) -> None:
    folder, _ranks = fake_run
    command = f"{sys.executable} -m echelon watch {folder} < /dev/null"
    with TerminalScreen(["sh", "-c", f"exec {command}"]) as screen:
        lines = screen.wait_for(lambda lines: any("2 processes" in line for line in lines) and lines, timeout_s=20)
        assert not any("q closes" in line for line in lines)
        assert screen.process.poll() is None


def test_without_a_terminal_the_state_is_printed_once_and_doctor_shows_each_rank(
    fake_run: tuple[Path, list[subprocess.Popen[bytes]]],
) -> None:
    folder, ranks = fake_run
    ranks[0].send_signal(signal.SIGSTOP)
    watch = subprocess.run([*ECHELON, "watch", str(folder)], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"^ +0 .*stopped \(SIGSTOP or a debugger\)", watch.stdout, re.MULTILINE), watch.stdout
    assert "\x1b" not in watch.stdout
    doctor = subprocess.run([*ECHELON, "doctor", str(folder)], capture_output=True, text=True, timeout=60, check=True)
    lines = doctor.stdout.splitlines()
    assert lines[0] == f"{folder}/run-1: no rank has stalled or failed"
    assert lines[1].startswith("the run is live; state (echelon watch")
    assert re.match(r"  rank 0: stopped \(SIGSTOP or a debugger\); step \d+; forward pass.*; at train.py:7;", lines[2])
    assert lines[3].startswith("  rank 1: ")


# Rank 2 computes 60 ms longer than the others in each step.
SLOW = """
import time
import torch
from echelon import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(80_000, 8))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
for (x,) in loader:
    loss = model(x).square().mean()
    if accelerator.process_index == 2:
        time.sleep(0.06)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.soak
def test_8_ranks_of_which_one_is_slow_and_one_is_stopped(command: Command, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SLOW)
    runs = tmp_path / "runs"
    launcher = command.start_launch(
        "--cpu", "--num_processes=8", f"--log_dir={runs}", "--stall_timeout=0", str(script), ECHELON_NO_RECORD="0"
    )
    command.wait_for(lambda: bool(list(runs.glob("*/run.json"))), "the run's folder")
    try:
        with TerminalScreen([*ECHELON, "watch", str(runs)], columns=110, lines=24) as screen:
            screen.wait_for(lambda lines: any(re.match(r" +2 .*slow: ", line) for line in lines), timeout_s=120)
            (folder,) = runs.glob("*")
            board = BoardReader(json.loads((folder / "run.json").read_text())["board"])
            watch = board.watch(5)
            board.remove()
            assert watch is not None
            os.kill(watch.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            lines = screen.wait_for(
                lambda lines: any(re.match(r" +5 .*stopped", line) for line in lines) and lines, timeout_s=2
            )
            print(f"visible after {time.monotonic() - stopped:.2f} s:", *lines, sep="\n")
            header = next(i for i, line in enumerate(lines) if line.strip().startswith("rank  "))
            assert re.match(r" +5 .*stopped \(SIGSTOP or a debugger\)", lines[header + 1])
            assert re.match(r" +2 .*slow: code outside the model", lines[header + 2])
            os.kill(watch.pid, signal.SIGCONT)
        doctor = command.echelon("doctor", str(runs))
        assert "the run is live; state" in doctor.out
        assert doctor.out.count("\n  rank ") == 8
    finally:
        launcher.send_signal(signal.SIGINT)
        command.finish(launcher)


def test_the_web_view_without_the_token_is_refused(fake_run: tuple[Path, list[subprocess.Popen[bytes]]]) -> None:
    folder, _ = fake_run
    server = subprocess.Popen([*ECHELON, "watch", "--web", str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        urls = [server.stdout.readline().split()[1] for _ in range(2)]
        for url in urls:
            with urlopen(url, timeout=30) as answer:
                assert answer.status == 200
            for wrong in (url.partition("?")[0], url[:-1]):
                with pytest.raises(HTTPError) as refusal:
                    urlopen(wrong, timeout=30)
                assert refusal.value.code == 403
                refusal.value.close()
        connections = psutil.Process(server.pid).net_connections()
        assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=30)
    assert server.returncode == 0


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_web_pages_update_in_a_browser(fake_run: tuple[Path, list[subprocess.Popen[bytes]]]) -> None:
    folder, ranks = fake_run
    server = WebServer(live := LiveRun(folder / "run-1"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with open_browser() as browser:
            browser.open(server.ranks_url)
            rows = "[...document.querySelectorAll('tbody tr')].map(row => [row.className, row.innerText])"
            _wait(lambda: len(browser.run(rows)) == 2)
            ranks[0].send_signal(signal.SIGSTOP)
            _wait(lambda: browser.run(rows)[0][0] == "stopped")
            ranks[0].send_signal(signal.SIGCONT)
            _wait(lambda: browser.run(rows)[0][0] != "stopped")
            assert browser.problems == []
            browser.open(server.url)
            seen = browser.run("document.body.innerText")
            _wait(lambda: browser.run("document.body.innerText") != seen)
            assert browser.problems == []
            assert all(
                address.startswith((f"http://127.0.0.1:{server.port}/", "data:")) for address in browser.requests
            )
    finally:
        server.stop()
        thread.join()
        server.close()
        live.close()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
