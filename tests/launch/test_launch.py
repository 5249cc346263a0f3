"""N processes asked = N processes run, each with its environment, and the script as it is."""

from __future__ import annotations

import json
import sys

import pytest

from echelon.base.cores import usable_cores
from tests.launch.conftest import Command

# Each rank writes what it sees; no torch, so that it starts in milliseconds.
NOTE = """
import json, os, sys
rank = os.environ.get("RANK", "none")
with open(f"rank_{rank}.json", "w") as file:
    json.dump({"env": dict(os.environ), "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__}, file)
"""


def notes(command: Command) -> list[dict]:
    files = sorted(command.directory.glob("rank_*.json"))
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("argv", "num_processes"),
    [
        ([], 1),
        (["--num_processes", "2", "--cpu"], 2),
        (["--nproc_per_node=2", "--nnodes=1", "--standalone", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], 2),
        (
            [
                "--nproc-per-node",
                "2",
                "--num_machines",
                "1",
                "--machine_rank=0",
                "--main_process_port",
                "0",
                "--use_cpu",
            ],
            2,
        ),
    ],
)
def test_every_process_asked_for_runs(argv: list[str], num_processes: int, command: Command) -> None:
    command.write("note.py", NOTE)
    result = command.launch(*argv, "note.py")
    assert result.code == 0, result.err
    found = notes(command)
    assert [n["env"]["RANK"] for n in found] == [str(i) for i in range(num_processes)]
    assert [n["env"]["LOCAL_RANK"] for n in found] == [str(i) for i in range(num_processes)]
    assert {n["env"]["WORLD_SIZE"] for n in found} == {str(num_processes)}
    assert {n["env"]["LOCAL_WORLD_SIZE"] for n in found} == {str(num_processes)}
    assert {n["env"]["MASTER_ADDR"] for n in found} == {"127.0.0.1"}
    assert {n["env"]["GLOO_SOCKET_IFNAME"] for n in found} <= {"lo", "lo0"}


def test_script_gets_its_arguments_untouched_and_its_environment(command: Command) -> None:
    command.write("sub/note.py", NOTE)
    args = ["--foo", "--num_processes", "7", "--a_b=c_d", "--", "-x", "--help"]
    result = command.launch(
        *["--num_processes", "2", "--mixed_precision", "bf16", "--gradient-accumulation-steps=4", "--debug", "-q"],
        *["--dynamo_backend", "torchxla_trace_once", "--dynamo_mode=max-autotune", "--dynamo_use_dynamic"],
        *["--parity", "exact", "--max-micro-batch-size=8"],
        *["--num_cpu_threads_per_process=3", "--rdzv_id=job7", "sub/note.py", *args],
        GLOO_SOCKET_IFNAME="eth7",
        ACCELERATE_MIXED_PRECISION="fp16",
    )
    assert result.code == 0, result.err
    assert result.err == ""
    for note in notes(command):
        env = note["env"]
        assert note["argv"] == ["sub/note.py", *args]
        assert note["path0"] == str(command.directory / "sub")
        assert note["file"] == str(command.directory / "sub" / "note.py")
        assert note["name"] == "__main__"
        assert env["OMP_NUM_THREADS"] == "3"
        assert env["GLOO_SOCKET_IFNAME"] == "eth7"  # the user's choice stays
        assert env["TORCHELASTIC_RUN_ID"] == "job7"
        assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
        assert env["ACCELERATE_DEBUG_MODE"] == "true"
        assert {name: env[name] for name in env if name.startswith("ACCELERATE_DYNAMO")} == {
            "ACCELERATE_DYNAMO_BACKEND": "torchxla_trace_once",
            "ACCELERATE_DYNAMO_MODE": "max-autotune",
            "ACCELERATE_DYNAMO_USE_DYNAMIC": "true",
        }
        assert env["ACCELERATE_USE_CPU"] == "true"  # two processes, and no accelerator
        config = json.loads(env["ECHELON_CONFIG"])
        assert config["mixed_precision"][0] == "bf16"
        assert config["mixed_precision"][2] == "--mixed_precision"
        assert config["parity"][::2] == ["exact", "--parity"]
        assert config["max_micro_batch_size"][::2] == [8, "--max-micro-batch-size"]


def test_flag_beats_environment_beats_file_and_the_loser_is_told(command: Command) -> None:
    command.write("note.py", NOTE)
    command.write("c.yaml", "mixed_precision: fp16\nnum_processes: 2\ngradient_accumulation_steps: 8\n")
    result = command.launch(
        "--config_file=c.yaml", "--mixed-precision=no", "note.py", ECHELON_GRADIENT_ACCUMULATION_STEPS="4"
    )
    assert result.code == 0, result.err
    found = notes(command)
    assert len(found) == 2
    config = {name: entry[0] for name, entry in json.loads(found[0]["env"]["ECHELON_CONFIG"]).items()}
    assert config == {"mixed_precision": "no", "num_processes": 2, "gradient_accumulation_steps": 4}
    assert "mixed_precision='no' (from flag --mixed-precision) overrides 'fp16' (from file c.yaml:1)" in result.err
    threads = max(1, usable_cores() // 2)
    assert found[0]["env"]["OMP_NUM_THREADS"] == str(threads)
    assert (
        f"echelon: OMP_NUM_THREADS={threads} for each process ({usable_cores()} usable cores), because " in result.err
    )


def test_module_runs_as_with_python_m(command: Command) -> None:
    command.write("package/__init__.py", "")
    command.write("package/__main__.py", NOTE)
    assert command.launch("-m", "package", "a", "--b").code == 0
    ours = notes(command)
    assert command.run([sys.executable, "-m", "package", "a", "--b"]).code == 0
    plain = notes(command)
    for key in ("argv", "path0", "name", "file"):
        assert [n[key] for n in ours] == [n[key] for n in plain]


def test_no_python_runs_any_program(command: Command) -> None:
    result = command.launch("--no_python", "--num_processes=2", "sh", "-c", 'echo "rank $RANK $0"; exit 0', "x_y")
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == ["rank 0 x_y", "rank 1 x_y"]


def test_tee_and_log_dir_keep_each_rank_apart(command: Command) -> None:
    command.write("say.py", "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n")
    result = command.launch("--num_processes=2", "--log_dir", "logs", "--quiet", "say.py")
    assert result.code == 0
    assert sorted(result.out.splitlines()) == ["[rank0]: out 0", "[rank1]: out 1"]
    assert sorted(result.err.splitlines()) == ["[rank0]: err", "[rank1]: err"]
    logs = {
        str(p.relative_to(command.directory / "logs").parent).partition("/")[2]: p
        for p in command.directory.rglob("stdout.log")
    }
    assert {name: path.read_text() for name, path in logs.items()} == {
        "attempt_0/rank_0": "out 0\n",
        "attempt_0/rank_1": "out 1\n",
    }


def test_restart_runs_the_ranks_again_on_a_new_store(command: Command) -> None:
    command.write(
        "second.py",
        "import os\nn = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print(n, os.environ['RANK'], os.environ['MASTER_PORT'], flush=True)\n"
        "if n == '0' and os.environ['RANK'] == '1': raise ValueError('once')\n",
    )
    result = command.launch("--num_processes=2", "--max_restarts=1", "second.py")
    assert result.code == 0, result.err
    rows = sorted(line.split() for line in result.out.splitlines())
    assert [row[:2] for row in rows if row[0] == "1"] == [["1", "0"], ["1", "1"]]
    assert len({row[2] for row in rows}) == 2
    assert "restart 1 of 1" in result.err


@pytest.mark.slow
def test_port_asked_for_that_is_taken_is_told(command: Command) -> None:
    command.write("note.py", NOTE)
    hold = "import socket, subprocess, sys\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\nsys.exit(subprocess.call([*sys.argv[1:], '--master_port', str(s.getsockname()[1]), 'note.py']))"
    result = command.run([sys.executable, "-c", hold, sys.executable, "-m", "echelon", "launch"])
    assert result.code == 1
    assert "cannot listen on 127.0.0.1:" in result.err
    assert "0 for any free port" in result.err
    assert "Traceback" not in result.err
