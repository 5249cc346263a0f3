"""``notebook_launcher`` in a real kernel: every function is defined in a cell, and one kernel runs all the cells.

The client of the kernel (nbclient, zmq, an event loop) lives in a process of its own: its threads, sockets and warnings
are no business of these tests.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from echelon.base.errors import ConfigError, LaunchError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.launch import spawn as spawning
from echelon.launch.spawn import debug_launcher, notebook_launcher
from tests.launch.conftest import Command

_LIMIT_S = 400
_CELL_LIMIT_S = 120  # then it is interrupted: a cell that hangs fails its own test only

_CLIENT = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells, limit_s = json.load(sys.stdin)
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells.values()])
client = NotebookClient(
    notebook,
    kernel_name="python3",
    allow_errors=True,
    interrupt_on_timeout=True,
    timeout=limit_s,
)
client.execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
"""

_CELLS = {
    "define": """
import os
import psutil
import torch
from echelon import Accelerator
from echelon.launch.spawn import debug_launcher, notebook_launcher

torch.set_num_threads(2)

def train(start):
    accelerator = Accelerator()
    rank, world = accelerator.process_index, accelerator.num_processes
    everyone = accelerator.gather(torch.tensor([start + rank]))
    print(f"rank {rank} of {world} on {accelerator.device.type}: {everyone.tolist()} {accelerator.mixed_precision}")
    accelerator.end_training()

def learn():
    print("threads", torch.get_num_threads())
    torch.set_num_threads(2)
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(300, 300))
    accelerator.backward(model(torch.randn(300, 300)).relu().sum())
    accelerator.print("learned", accelerator.num_processes)
    accelerator.end_training()

def fail_on_one():
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        raise ValueError("bad sample 17")
    accelerator.wait_for_everyone()

def speak():
    os.system("echo from a command")
    print("an error line", file=__import__("sys").stderr)

def wait_for_ever():
    print("waiting", flush=True)
    Accelerator().wait_for_everyone()
    open("waits_" + os.environ["RANK"], "w").close()
    if int(os.environ["RANK"]) == 1:
        torch.distributed.barrier()  # deep inside native code
    __import__("time").sleep(1000)
""",
    "first": "notebook_launcher(train, args=(10,), num_processes=2)",
    "second": "notebook_launcher(train, (20,), num_processes=2, mixed_precision='bf16')",
    "debug": "debug_launcher(train, (30,), num_processes=3)",
    "tutorial": """
def train_ddp(rank, world_size):
    assert rank == int(os.environ["RANK"])
    print("rank", rank, "of", world_size)
notebook_launcher(train_ddp, args=(), num_processes=2)
""",
    "no arguments": "notebook_launcher(train, num_processes=2)",
    "autograd": """
a = torch.randn(600, 600, requires_grad=True)
(a @ a).relu().sum().backward()  # starts torch's threads, which no forked process has
""",
    "after autograd": "notebook_launcher(learn, num_processes=2)",
    "without fork": """
fork = os.fork
del os.fork  # as on Windows; and after a cell has used a GPU, a fork is of no use either
try:
    notebook_launcher(train, (40,), num_processes=2)
finally:
    os.fork = fork
""",
    "failing": "notebook_launcher(fail_on_one, num_processes=2)",
    "all streams": "notebook_launcher(speak, num_processes=2)",
    "alone": """
before = dict(os.environ)
def alone(kernel):
    print(kernel == os.getpid(), Accelerator().mixed_precision)
notebook_launcher(alone, (os.getpid(),), num_processes=1, mixed_precision="bf16")
print(before == dict(os.environ))
""",
    "wrong precision": "notebook_launcher(train, (1,), num_processes=2, mixed_precision='bf17')",
    "interrupted": """
import signal, threading, time
def interrupt():
    while not all(os.path.exists(f"waits_{rank}") for rank in range(2)):
        time.sleep(0.05)
    time.sleep(0.2)  # for the rank that goes on into native code
    os.kill(os.getpid(), signal.SIGINT)  # as the button does
threading.Thread(target=interrupt, daemon=True).start()
notebook_launcher(wait_for_ever, num_processes=2)
""",
    # Python's own resource tracker lives as long as the kernel, once a process was started without a fork.
    "left over": "print([p for p in psutil.Process().children(True) if 'resource_tracker' not in str(p.cmdline())])",
    "group": """
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
notebook_launcher(train, (1,), num_processes=2)
""",
}


@dataclass(frozen=True)
class _Shown:
    out: str
    err: str
    error: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _Shown]:
    """What each cell showed, by its name."""
    folder = tmp_path_factory.mktemp("notebook")
    result = subprocess.run(
        [sys.executable, "-c", _CLIENT],
        input=json.dumps([_CELLS, _CELL_LIMIT_S]),
        capture_output=True,
        text=True,
        cwd=folder,
        env=_environment(folder),
        timeout=_LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return {name: _read(outputs) for name, outputs in zip(_CELLS, json.loads(result.stdout))}


def _environment(folder: Path) -> dict[str, str]:
    foreign = ("ECHELON_", "ACCELERATE_", "GLOO_", "TORCHELASTIC_", "OMP_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in ("RANK", "WORLD_SIZE")}
    # A kernel writes its history and its sockets' addresses somewhere: not into the home of who runs the tests.
    own = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"), str(folder))
    return {**inherited, **own, "CUDA_VISIBLE_DEVICES": ""}


def _read(outputs: list[dict[str, object]]) -> _Shown:
    text = {"stdout": "", "stderr": "", "error": ""}
    for output in outputs:
        if output["output_type"] == "stream":
            text[str(output["name"])] += str(output["text"])
        elif output["output_type"] == "error":
            text["error"] += f"{output['ename']}: {output['evalue']}"
    return _Shown(text["stdout"], text["stderr"], text["error"])


def _gathered(num_ranks: int, start: int, precision: str = "no") -> list[str]:
    numbers = [start + rank for rank in range(num_ranks)]
    return [f"rank {rank} of {num_ranks} on cpu: {numbers} {precision}" for rank in range(num_ranks)]


_SHOWN = {
    "define": [],
    "first": _gathered(2, 10),
    "second": _gathered(2, 20, "bf16"),  # it runs twice in one kernel
    "tutorial": ["rank 0 of 2", "rank 1 of 2"],  # the function takes the rank and the number of ranks
    "debug": _gathered(3, 30),
    "without fork": _gathered(2, 40),  # a function of a cell is carried to new processes
    "autograd": [],
    "after autograd": ["learned 2", "threads 1", "threads 1"],
    "all streams": ["from a command", "from a command"],
    "alone": ["True", "True bf16"],
}
_ERRORS = {
    "no arguments": [
        "UsageError: train(start) cannot be called by notebook_launcher(args=())",
        "pass one value per parameter in args",
    ],
    "failing": [
        "LaunchError: rank 1 failed first: ValueError: bad sample 17",
        "Traceback (most recent call last):",
        "in fail_on_one",
    ],
    "wrong precision": ["ConfigError: mixed_precision='bf17' is not one of no, fp16, bf16"],
    "group": ["", "this kernel has initialized a process group"],
}


@pytest.mark.soak
@pytest.mark.parametrize("cell", _SHOWN)
def test_what_the_ranks_print_is_shown_in_the_cell(cell: str, shown: dict[str, _Shown]) -> None:
    assert shown[cell].error == ""
    assert sorted(shown[cell].out.splitlines()) == _SHOWN[cell]
    if cell == "all streams":
        assert shown[cell].err.splitlines() == ["an error line", "an error line"]


@pytest.mark.soak
@pytest.mark.parametrize("cell", _ERRORS)
def test_an_error_in_the_cell_says_what_and_what_to_do(cell: str, shown: dict[str, _Shown]) -> None:
    begin, *parts = _ERRORS[cell]
    assert shown[cell].error.startswith(begin)
    assert all(part in shown[cell].error for part in parts)


@pytest.mark.parametrize(("is_used", "method"), [(False, "fork"), (True, "spawn")])
def test_new_processes_are_started_only_after_the_device_was_used(
    is_used: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(is_initialized=lambda: is_used)
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    assert spawning._start_method(uses_device=True) == method
    assert spawning._start_method(uses_device=False) == "fork"


def test_what_cannot_be_carried_to_new_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    lock = threading.Lock()
    with pytest.raises(
        UsageError, match=r"(?s)cannot be sent to new processes: TypeError: .*lock.*create the object inside"
    ):
        debug_launcher(lambda: lock)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(LaunchError, match='pip install "cloudpickle>='):
        debug_launcher(print)


@pytest.mark.soak
def test_more_threads_are_left_out_with_one_warning(shown: dict[str, _Shown]) -> None:
    assert shown["after autograd"].err.count("torch.set_num_threads(2) is ignored") == 1


@pytest.mark.slow
def test_interrupting_the_cell_stops_the_ranks(shown: dict[str, _Shown]) -> None:
    assert shown["interrupted"].out.splitlines() == ["waiting", "waiting"]
    assert shown["interrupted"].error.startswith("KeyboardInterrupt")
    assert shown["left over"].out == "[]\n"


_STUCK = """
import pathlib
import torch.distributed as dist
from echelon.launch.spawn import notebook_launcher

def stuck():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pathlib.Path(str(rank)).touch()
    while rank == 0:  # deaf to all but SIGKILL, as native code is
        try:
            __import__("time").sleep(1000)
        except KeyboardInterrupt:
            pass
    dist.barrier()

notebook_launcher(stuck, num_processes=2)
"""


@pytest.mark.slow
def test_the_ranks_end_when_the_kernel_is_killed(command: Command) -> None:
    kernel = command.start([sys.executable, command.write("stuck.py", _STUCK)])
    command.wait_for_files("0", "1")
    kernel.kill()
    kernel.wait()
    command.wait_for(lambda: not command.left_over(), "the ranks to end")


def test_the_signatures_are_those_of_accelerate() -> None:
    # Read from accelerate 1.15.0; it has no annotations.
    assert _defaults(notebook_launcher) == {
        "function": inspect.Parameter.empty,
        "args": (),
        "num_processes": None,
        "mixed_precision": "no",
        "use_port": "29500",
        "master_addr": "127.0.0.1",
        "node_rank": 0,
        "num_nodes": 1,
        "rdzv_backend": "static",
        "rdzv_endpoint": "",
        "rdzv_conf": None,
        "rdzv_id": "none",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "log_line_prefix_template": None,
    }
    assert _defaults(debug_launcher) == {"function": inspect.Parameter.empty, "args": (), "num_processes": 2}


def _defaults(function: object) -> dict[str, object]:
    assert callable(function)
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


@pytest.mark.parametrize("name", ["num_nodes", "node_rank", "max_restarts"])
def test_what_needs_a_launcher_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"notebook_launcher\({name}=2\) is not supported"):
        notebook_launcher(print, num_processes=2, **{name: 2})  # type: ignore[arg-type]


def test_no_process_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_processes=0 is below 1"):
        notebook_launcher(print, num_processes=0)


def test_a_port_of_the_users_own_has_no_effect_and_that_is_said() -> None:
    called: list[int] = []
    with pytest.warns(EchelonWarning, match="ignores use_port"):
        notebook_launcher(called.append, (7,), num_processes=1, use_port="29501")
    assert called == [7]
