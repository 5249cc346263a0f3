"""Wrong command lines: told before anything is started, in words, quickly, with exit code 2."""

from __future__ import annotations

import resource
import sys

import pytest

from echelon.base.errors import ConfigError
from echelon.cli import launch
from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import from_flags
from tests.launch.conftest import Command

RAN = "open('ran', 'w')\n"

CASES = {
    "missing script": (["gone.py"], "the script gone.py does not exist", "check the path"),
    "no script": ([], "SCRIPT is missing", "write echelon launch [OPTIONS] SCRIPT"),
    "directory": (["."], ". is a directory, not a Python script", "pass a file"),
    "not utf-8": (["latin.py"], "latin.py is not valid utf-8 text: byte 0xe9", "# -*- coding: latin-1 -*-"),
    "null bytes": (["nul.py"], "", "do:"),
    "syntax error": (["syntax.py"], "syntax error", "fix this line"),
    "missing module": (["-m", "no_such_module"], "no module named 'no_such_module'", "check the name"),
    "missing program": (["--no_python", "./gone"], "./gone is not an executable program", "check the path"),
    "tpu": (
        ["--tpu", "ok.py"],
        "echelon does not run on TPUs\n  where: flag --tpu",
        "the entry point 'echelon.engines'",
    ),
    "zero processes": (
        ["--num_processes", "0", "ok.py"],
        "'0' is not a valid number of processes",
        "a positive integer",
    ),
    "negative processes": (["--num_processes=-2", "ok.py"], "'-2' is not a valid number", "a positive integer"),
    "processes in words": (
        ["--nproc_per_node", "two", "ok.py"],
        "'two' is not a valid number of processes\n  where: flag --nproc_per_node\n",
        "auto, gpu or cpu",
    ),
    "a process per accelerator": (["--nproc-per-node=gpu", "ok.py"], "this machine has no accelerator", "do:"),
    "processes from env": (["ok.py"], "num_processes=0 is below 1", "at least 1"),
    "precision": (
        ["--mixed_precision", "fp17", "ok.py"],
        "mixed_precision='fp17' is not one of no, fp16, bf16, fp8",
        "do:",
    ),
    "dynamo": (
        ["--dynamo_backend", "torhchxla_trace_once", "ok.py"],
        "dynamo_backend='torhchxla_trace_once' is not one of no, eager, aot_eager, inductor",
        "torchxla_trace_once",
    ),
    "accumulation": (["--gradient_accumulation_steps=x", "ok.py"], "gradient_accumulation_steps='x'", "an integer"),
    "parity": (["--parity=exakt", "ok.py"], "parity='exakt' is not one of off, exact, bitwise", "flag --parity"),
    "micro batch": (["--max_micro_batch_size", "0", "ok.py"], "max_micro_batch_size=0 is below 1", "at least 1"),
    "unknown flag": (
        ["--nproc_per_nodes=2", "ok.py"],
        "unknown flag --nproc_per_nodes",
        "did you mean --nproc_per_node?",
    ),
    "two names": (
        ["--num_processes", "2", "--nproc-per-node=3", "ok.py"],
        "set the same setting to different values",
        "remove one of them",
    ),
    "several machines": (["--nnodes=2", "ok.py"], "need a rendezvous address", "set --main_process_ip"),
    "accelerate machines": (
        ["--num_machines", "2", "ok.py"],
        "need a rendezvous address",
        "--rdzv_endpoint HOST:PORT",
    ),
    "second machine": (
        ["--machine_rank=1", "ok.py"],
        "machine rank 1 is out of range for a single-machine run",
        "set the number of machines",
    ),
    "another host": (
        ["--rdzv_endpoint=10.0.0.7:29400", "ok.py"],
        "10.0.0.7 is not an address of this machine",
        "remove the address",
    ),
    "rendezvous": (
        ["--rdzv-backend=etcd", "ok.py"],
        "rendezvous backend 'etcd' is not supported",
        "remove this setting",
    ),
    "port": (
        ["--master_port", "70000", "ok.py"],
        "main_process_port=70000 is above 65535",
        "an integer of at most 65535",
    ),
    "module and program": (["-m", "--no_python", "ok.py"], "are mutually exclusive", "remove one of them"),
    "cpu and gpu": (["--cpu", "--multi_gpu", "ok.py"], "are mutually exclusive", "remove one of them"),
    "strict": (["--strict", "--mixed_precision=bf16", "ok.py"], "mixed_precision is set twice", "remove one"),
    "tutorial's hosts": (
        ["--localhost:0,2,3,4", "ok.py"],
        "unknown flag --localhost:0,2,3,4",
        "did you mean --include localhost:0,2,3,4?",
    ),
    "another machine": (
        ["--include", "worker-1", "ok.py"],
        "the number of slots of worker-1 is unknown",
        "add --hostfile FILE",
    ),
    "machines in a file": (["--config_file", "two.yaml", "ok.py"], "where: file two.yaml:2", "set --main_process_ip"),
    "two ways to shard": (["--use_fsdp", "--use-deepspeed", "ok.py"], "are mutually exclusive", "remove one of them"),
    "nothing is sharded": (["--fsdp_version=2", "ok.py"], "fsdp_version=2 would have no effect", "add --use_fsdp"),
    "misspelt sharding flag": (
        ["--use_fsdp", "--fsdp_offload_parms", "true", "ok.py"],
        "unknown flag --fsdp_offload_parms",
        "did you mean --fsdp_offload_params?",
    ),
    "wrong stage": (
        ["--use_deepspeed", "--zero_stage", "4", "ok.py"],
        "zero_stage='4' is not one of 0, 1, 2, 3",
        "do:",
    ),
    "missing json": (
        ["--deepspeed", "gone.json", "ok.py"],
        "the DeepSpeed config file gone.json does not exist",
        "correct the path",
    ),
    "engine and stage": (
        ["--use_deepspeed", "--zero_stage=3", "--engine=ddp", "ok.py"],
        "zero_stage=3 (from flag --zero_stage) and engine='ddp' (from flag --engine) contradict each other",
        "remove engine",
    ),
    "too many processes": (["--cpu", "--nproc_per_node=4000", "ok.py"], "4000 processes", "or add --oversubscribe"),
    "gpus by number": (["--gpu_ids", "0,1", "ok.py"], "this machine has no accelerator", "add --cpu (or ECHELON_CPU=1"),
    "gpus by count": (["--num_gpus=2", "ok.py"], "--num_gpus requests accelerators", "add --cpu (or ECHELON_CPU=1"),
    "gpus from env": (["ok.py"], "where: env ECHELON_GPU_IDS", "add --cpu (or ECHELON_CPU=1"),
    "gpus of a file": (
        ["--config_file", "gpus.yaml", "ok.py"],
        "where: file gpus.yaml:2",
        "add --cpu (or ECHELON_CPU=1",
    ),
    "gpus by a file's kind of run": (
        ["--config_file", "multi.yaml", "ok.py"],
        "where: file multi.yaml:1",
        "add --cpu (or ECHELON_CPU=1",
    ),
    "gpus by the default file": (
        ["ok.py"],
        "distributed_type: MULTI_GPU requests accelerators",
        "use_cpu: true in a config file",
    ),
    "megatron": (["--use_megatron_lm", "ok.py"], "Megatron-LM is not supported", "--use_fsdp or --use_deepspeed"),
    "config file": (["--config_file", "gone.yaml", "ok.py"], "cannot read the config file gone.yaml", "check the path"),
}


MULTI_GPU = "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: false\n"


@pytest.mark.sample(7)
@pytest.mark.parametrize("case", CASES)
def test_wrong_command_line_says_what_and_what_to_do(case: str, command: Command) -> None:
    argv, what, do = CASES[case]
    command.write("ok.py", RAN)
    command.write("latin.py", RAN.encode() + b"# caf\xe9\n")
    command.write("nul.py", RAN.encode() + b"\0\n")
    command.write("syntax.py", RAN + "def f(:\n")
    command.write("two.yaml", "num_processes: 16\nnum_machines: 2\n")
    command.write("gpus.yaml", "num_processes: 2\ngpu_ids: 0,1\n")
    command.write("multi.yaml", MULTI_GPU)
    command.write("home/accelerate/default_config.yaml", MULTI_GPU)
    variables = {
        "gpus by the default file": {"HF_HOME": str(command.directory / "home")},
        "processes from env": {"ECHELON_NUM_PROCESSES": "0"},
        "strict": {"ECHELON_MIXED_PRECISION": "fp16"},
        "gpus from env": {"ECHELON_GPU_IDS": "0,1"},
    }
    result = command.launch(*argv, **variables.get(case, {}))
    assert result.code == 2, result.err
    assert what in result.err
    assert do in result.err
    assert "Traceback" not in result.err
    assert result.err.startswith("echelon: ")
    assert not (command.directory / "ran").exists()


def test_place_of_a_bad_byte_and_of_a_syntax_error_is_named(command: Command) -> None:
    command.write("latin.py", b"a = 1\nb = 'caf\xe9'\n")
    command.write("syntax.py", "a = 1\ndef f(:\n")
    assert "where: latin.py:2" in command.launch("latin.py").err
    assert "where: syntax.py:2: def f(:" in command.launch("syntax.py").err


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "argv", "variables"),
    [
        (MULTI_GPU, ["--cpu"], {}),
        (MULTI_GPU, [], {"ACCELERATE_USE_CPU": "true"}),
        (MULTI_GPU.replace("false", "true"), [], {}),
        (MULTI_GPU.replace("MULTI_GPU", "'NO'"), [], {}),  # what `accelerate config` writes for a laptop
        (
            MULTI_GPU.replace("num_processes: 2\n", ""),
            [],
            {},
        ),  # what `echelon config` writes where nobody said a number
    ],
)
def test_a_file_for_gpus_runs_on_the_cpu_where_that_was_said(
    text: str, argv: list[str], variables: dict[str, str], command: Command
) -> None:
    command.write("ok.py", RAN)
    command.write("multi.yaml", text)
    result = command.launch("--config_file", "multi.yaml", "--num_processes=1", *argv, "ok.py", **variables)
    assert result.code == 0, result.err
    assert (command.directory / "ran").exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize("argv", [["--help"], ["launch", "--help"], ["launch", "gone.py"], ["config", "explain"]])
def test_command_line_does_not_import_torch(argv: list[str], command: Command) -> None:
    program = (
        "import sys\nfrom echelon.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('HEAVY', sorted({'torch', 'rich', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    result = command.run([sys.executable, "-c", program, *argv])
    assert result.out.splitlines()[-1] == "HEAVY []"


@pytest.mark.slow
def test_help_is_fast(command: Command) -> None:
    times = []
    for _ in range(5):
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert command.echelon("--help").code == 0
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(ended.ru_utime - began.ru_utime + ended.ru_stime - began.ru_stime)
    assert min(times) < 0.25  # of the processor's time, and the best of five: the machine may be busy


def test_version_and_console_script(command: Command) -> None:
    assert command.echelon("--version").out.startswith("echelon ")
    assert "Usage: echelon launch" in command.echelon("launch", "--help").out


@pytest.mark.parametrize(("asked", "num_processes"), [(None, 4), ("auto", 4), ("gpu", 4), ("3", 3), ("4", 4)])
def test_processes_on_a_machine_with_four_accelerators(asked: str | None, num_processes: int) -> None:
    assert launch._num_processes(*on_four(asked), 4) == num_processes


def test_more_processes_than_accelerators_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(
        ConfigError, match=r"5 processes, but this machine has 4 accelerators\n  where: flag -n\n.*--cpu"
    ):
        launch._num_processes(*on_four("5"), 4)


def on_four(asked: str | None) -> tuple[Resolved[RunConfig], dict[str, object], dict[str, str]]:
    given = {"num_processes": (asked, "-n")} if asked and asked.isdigit() else {}
    return (
        resolve(RunConfig, [from_flags(given)]),
        {"num_processes": asked, "multi_gpu": False},
        {"num_processes": "-n"},
    )


def test_a_usage_error_of_the_script_notes_the_flags_of_the_launcher_among_its_arguments(command: Command) -> None:
    command.write("train.py", "import argparse\nargparse.ArgumentParser().parse_args()\n")
    result = command.launch("--cpu", "train.py", "--parity", "exact")
    assert result.code == 2, result.err
    # before the run, and again below the usage error
    note = "--parity after the script was passed to train.py, not to the launcher"
    assert result.err.count(note) == 2
    assert note in result.err.partition("unrecognized arguments")[2]
    assert result.err.count("echelon launch --parity ... train.py") == 2
