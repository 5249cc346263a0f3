"""Flags of ``echelon launch`` that stand after the script, where the launcher does not read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.cli.help.misplaced_flags import note_about_flags
from echelon.cli.launch import command
from echelon.launch.script import Script


def _note(tmp_path: Path, source: str, *argv: str, failed: bool = False, kind: str = "script") -> str | None:
    script = tmp_path / "train.py"
    (tmp_path / "beside_the_script.py").write_text("parser.add_argument('--debug')\n")
    script.write_text(source)
    place = argv.index("SCRIPT")
    context = command.make_context("launch", [*argv[:place], str(script), *argv[place + 1 :]])
    target = Script(kind=kind, target=str(script), args=tuple(context.params["args"]))  # type: ignore[arg-type]
    note = note_about_flags(context, target, typed={"num_processes": "x"} if place else {}, failed=failed)
    return None if note is None else note.replace(str(script), "train.py")


@pytest.mark.parametrize(
    "flag", ["--num_processes=2", "--nproc-per-node=2", "--num-machines=2", "--max_restarts=3", "--gpu_ids=0,1"]
)
def test_a_flag_that_only_a_launcher_has_is_noted(flag: str, tmp_path: Path) -> None:
    name = flag.partition("=")[0]
    assert _note(tmp_path, "import torch\n", "SCRIPT", "--lr", "1", flag) == (
        f"{name} after the script was passed to train.py, not to the launcher; put launcher flags before the script: "
        f"echelon launch {name} ... train.py"
    )


@pytest.mark.parametrize("flag", ["--cpu", "--debug", "--quiet", "--use_fsdp", "--strict"])
def test_a_flag_without_a_value_that_the_script_does_not_define_is_noted(flag: str, tmp_path: Path) -> None:
    source = "import torch\nmodel = Net().cpu()  # the debug, quiet and strict modes of the cpu\ntorch.device('cpu')\n"
    assert _note(tmp_path, source, "--num-processes", "2", "SCRIPT", flag) == (
        f"{flag} after the script was passed to train.py, not to the launcher; put launcher flags before the script: "
        f"echelon launch {flag} ... train.py"
    )


@pytest.mark.parametrize(
    "arguments",
    [("--mixed_precision", "bf16"), ("--parity=exact",), ("--log_dir", "x"), ("--config-file", "y")],
    ids=str,
)
def test_a_flag_with_a_value_that_the_script_does_not_define_is_noted(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    flag = arguments[0].partition("=")[0]
    assert f"{flag} after the script was passed to" in str(_note(tmp_path, "import torch\n", "SCRIPT", *arguments))


@pytest.mark.parametrize(
    ("source", "argv"),
    [
        ("parser.add_argument('--num_processes')\n", ("SCRIPT", "--num-processes", "2")),
        ("class Arguments:\n    num_processes: int\n", ("SCRIPT", "--num_processes", "2")),
        ("", ("--num-processes", "2", "SCRIPT", "--num_processes", "2")),
        (
            "for name in ('mixed_precision', 'parity'):\n    parser.add_argument('--' + name)\n",
            ("SCRIPT", "--mixed_precision", "bf16", "--parity", "exact"),
        ),
        ("parser.add_argument('--log-dir')\n", ("SCRIPT", "--log_dir=x")),
        ("parser.add_argument('--cpu')\n", ("SCRIPT", "--cpu")),
        ("is_cpu = '--use_cpu' in sys.argv\n", ("SCRIPT", "--use-cpu")),
        ("flags.DEFINE_bool('debug', False)\n", ("SCRIPT", "--debug")),
        ("class Arguments:\n    debug: bool = False\n", ("SCRIPT", "--debug")),
        ("for name in names:\n    parser.add_argument(f'--{name}')\n", ("SCRIPT", "--quiet")),
        ("HfArgumentParser(TrainingArguments).parse_args()\n", ("SCRIPT", "--use_cpu")),
        ("from project.training import main\nmain()\n", ("SCRIPT", "--debug")),
        ("import beside_the_script\n", ("SCRIPT", "--debug")),
        ("", ("SCRIPT", "--cpu=1")),
        ("", ("SCRIPT", "num_processes", "2", "-m", "-q", "--no_such_flag")),
        ("", ("SCRIPT", "--", "--num_processes", "2")),
        ("", ("SCRIPT",)),
    ],
)
def test_arguments_that_may_be_those_of_the_script_are_not_noted(
    source: str, argv: tuple[str, ...], tmp_path: Path
) -> None:
    assert _note(tmp_path, source, *argv) is None


@pytest.mark.parametrize("kind", ["module", "program"])
def test_a_program_that_cannot_be_read_gets_no_note(kind: str, tmp_path: Path) -> None:
    assert _note(tmp_path, "", "SCRIPT", "--num_processes", "2", "--cpu", kind=kind) is None


def test_each_flag_of_the_launcher_is_noted_after_a_usage_error_of_the_script(tmp_path: Path) -> None:
    note = _note(tmp_path, "'num_processes'", "SCRIPT", "--parity", "exact", "--cpu", "--lr", "1", failed=True)
    assert note is not None
    assert note.startswith("--parity, --cpu after the script were passed to train.py")
    assert _note(tmp_path, "", "SCRIPT", "--lr", "1", failed=True) is None
