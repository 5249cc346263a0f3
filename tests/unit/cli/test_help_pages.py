"""`echelon launch --help` is a page; `--help_all` has everything, in groups; colours follow the terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from echelon.base.messages import terminal
from echelon.base.messages.terminal import wrap
from echelon.cli import launch
from echelon.cli.help.completion import VARIABLE, complete_engines
from echelon.cli.launch import command
from echelon.cli.launch_options import COMMON, PROCESS_FLAGS
from echelon.cli.main import _run, cli
from echelon.config.key_table import KEYS
from echelon.engines.registry import ENGINES

_COMMON = [name for names in COMMON.values() for name in names if not name.startswith("help")]


def _options() -> dict[str, click.Option]:
    return {str(p.name): p for p in command.params if isinstance(p, click.Option)}


def _page(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert _run(argv) == 0
    return capsys.readouterr().out


def test_help_shows_twelve_options_in_groups_and_three_examples(capsys: pytest.CaptureFixture[str]) -> None:
    page = _page(capsys, "launch", "--help")
    assert len(_COMMON) == 12
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)", page, flags=re.MULTILINE)
    assert [flag for flag in flags if not flag.startswith("--help")] == [f"--{name}" for name in _COMMON]
    assert re.findall(r"^(\S.*):$", page, flags=re.MULTILINE) == [*COMMON, "Examples"]
    assert page.count("    echelon launch --") == 3
    assert "--help_all" in page


def test_help_all_shows_each_option_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    page = _page(capsys, "launch", "--help_all")
    shown = re.findall(r"^  ((?:-\w, )?--[\w-]+(?:, --[\w-]+)*)", page, flags=re.MULTILINE)
    first = [names.split(", ") for names in shown]
    assert len(first) == len([one for one in _options().values() if not one.hidden]) + 1  # with --help
    assert {key.field for key in KEYS if key.flags} <= _options().keys(), "put the setting into launch_options.GROUPS"


def test_flags_are_spelled_as_in_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    page = _page(capsys, "launch", "--help_all").replace("--help_all", "")
    assert re.findall(r"--[a-z0-9]+-[\w-]+", page) == []


@pytest.mark.parametrize(
    "argv", [("config",), ("config", "default"), ("submit", "slurm"), ("checkpoint", "merge"), ("merge-weights",)]
)
def test_flags_of_other_commands_are_spelled_so_too(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    page = _page(capsys, *argv, "--help")
    assert re.findall(r"^  (?:-\w, )?--[a-z0-9]+-.*", page, flags=re.MULTILINE) == []


@pytest.mark.parametrize(
    ("argv", "what", "where"),
    [
        (("launch", "--cpu", "--mixed_precision"), "--mixed_precision needs a value", "launch"),
        (("launch", "--mixed-precision"), "--mixed_precision needs a value", "launch"),
        (("config", "--config_file", "x", "default", "--mixed_precision"), "--mixed_precision needs", "config default"),
        (("config", "--config_file"), "--config_file needs a value", "config"),
        (("runs", "show", "a", "b"), "unexpected argument b", "runs show"),
    ],
)
def test_errors_of_click_name_the_flag_as_the_documents_and_the_command(
    argv: tuple[str, ...], what: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(argv) == 2
    error = capsys.readouterr().err
    assert what in error
    assert f"  where: echelon {where}\n" in error
    assert f"  do:    see echelon {where} --help\n" in error


@pytest.mark.parametrize(
    ("argv", "where", "what", "do"),
    [
        ("runs lss", "runs", "unknown command 'lss'", "did you mean echelon runs ls?"),
        ("checkpoint verif x", "checkpoint", "unknown command 'verif'", "did you mean echelon checkpoint verify?"),
        ("config explan", "config", "unknown command 'explan'", "did you mean echelon config explain?"),
        ("runs qqq", "runs", "unknown command 'qqq'", "commands: compare, ls, show"),
        ("launch -n 2 x.py", "launch", "unknown flag -n", "did you mean --num_processes?"),
        (
            "launch --learning_rate 0.1 x.py",
            "launch",
            "unknown flag --learning_rate",
            "flags of your script come after its name: echelon launch [FLAGS] SCRIPT --learning_rate; see echelon launch --help",
        ),
        ("launch --num_proceses 2 x.py", "launch", "unknown flag --num_proceses", "did you mean --num_processes?"),
        ("verify --cpu x.py", "verify", "unknown flag --cpu", "leave it out: echelon verify always uses the CPU"),
        ("verify --nproc_per_node 2 x.py", "verify", "unknown flag --nproc_per_node", "did you mean --num_processes?"),
        ("tune -n 2 x.py", "tune", "unknown flag -n", "leave it out: echelon tune tries several numbers of processes"),
        ("lunch x.py", "", "unknown command 'lunch'", "did you mean echelon launch?"),
        (
            "launch --max_restarts no x.py",
            "launch",
            "--max_restarts='no' is not an integer",
            "set it to an integer",
        ),
        (
            "launch --max_restarts=-1 x.py",
            "launch",
            "--max_restarts=-1 is below 0",
            "set it to an integer of at least 0",
        ),
        ("watch --port 99999", "watch", "--port=99999 is above 65535", "set it to an integer of at most 65535"),
        (
            "checkpoint merge a b --precision fp61",
            "checkpoint merge",
            "--precision='fp61' is not one of fp32, fp16, bf16",
            "did you mean fp16?",
        ),
        ("completion csh", "completion", "SHELL='csh' is not one of bash, zsh, fish", "did you mean zsh?"),
        ("runs ls --json=1", "runs ls", "--json takes no value", "write --json alone"),
        ("x.py", "", "unknown command 'x.py'", "did you mean echelon launch x.py?"),
        ("--cpu x.py", "", "unknown flag --cpu", "flags follow a command, as in echelon launch --cpu"),
        (
            "launch --num_processes x.py",
            "launch",
            "SCRIPT is missing",
            "--num_processes took x.py as its value; write --num_processes VALUE x.py",
        ),
        (
            "checkpoint merge a",
            "checkpoint merge",
            "OUT is missing",
            "write echelon checkpoint merge [OPTIONS] PATH OUT",
        ),
        (
            "checkpoint export a b",
            "checkpoint export",
            "--format is missing",
            "add --format accelerate|transformers|dcp",
        ),
        ("token .", "token", ". is a directory, not a file", "pass a file, for example token"),
    ],
)
@pytest.mark.parametrize("locale", ["C", "zh_CN.UTF-8"])
def test_wrong_words_get_the_nearest_right_ones(
    argv: str,
    where: str,
    what: str,
    do: str,
    locale: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LANGUAGE", locale)
    assert _run(argv.split()) == 2
    error = capsys.readouterr().err
    if locale == "C":
        assert error == f"echelon: {what}\n  where: {f'echelon {where}'.strip()}\n  do:    {do}\n"
    else:
        lines = [line for line in error.splitlines() if not re.search("[\u4e00-\u9fff]", line)]
        assert (len(error.splitlines()), lines) == (3, [])


def test_what_is_missing_is_suggested_without_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "train.py").write_text("")
    cases = [
        (["launch", "trian.py"], "did you mean train.py?"),
        (["launch", "train"], "did you mean train.py?"),
        (["launch", "python", "train.py"], "leave out python"),
        (["launch", "-m", "train.py"], "echelon launch train.py (without -m) runs a file"),
        (["verify", "trian.py"], "did you mean train.py?"),
        (["tune", "trian.py"], "did you mean train.py?"),
        (["checkpoint", "ls", "run"], "did you mean runs?"),
        (["checkpoint", "show", "train.py"], "train.py is a file, not a folder"),
        (["merge_weights", "run", "out"], "did you mean runs?"),
        (["test", "--gpus", "x"], "pass all, a number, or indices such as 0,2"),
        (["verify", "--num_processes", "1,x", "train.py"], "'x' is not a number of processes"),
    ]
    # All in one process, because a start of Python takes as long as all of them.
    program = (
        "import json, sys\nfrom contextlib import redirect_stderr\nfrom io import StringIO\nfrom echelon.cli.main import _run\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    with redirect_stderr(StringIO()) as errors:\n        code = _run(argv)\n"
        "    print(json.dumps([code, errors.getvalue(), 'torch' in sys.modules]))"
    )
    command = [sys.executable, "-c", program, json.dumps([argv for argv, _ in cases])]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    for (argv, text), line in zip(cases, found.stdout.splitlines(), strict=True):
        code, errors, has_torch = json.loads(line)
        assert (code, text in errors, has_torch) == (2, True, False), (argv, errors)


def test_help_shows_one_name_of_an_option_and_no_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    page = _page(capsys, "verify", "--help")
    assert "  --num_processes N,N,... " in page
    assert not re.search(r"--procs|--engine |\[x>=", page)
    assert "merge-weights" not in _page(capsys, "--help")  # echelon checkpoint merge does the same
    for argv in (("watch",), ("tune",), ("submit", "slurm"), ("submit", "kubernetes"), ("checkpoint", "merge")):
        assert not re.search(r"RANGE|INTEGER|<=|x>=|--[a-z]+-", _page(capsys, *argv, "--help")), argv


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        (("launch", "--help-all"), None, None),
        (("verify", "--procs", "2,4", "x.py"), "procs", "2,4"),
        (("verify", "--num-processes", "2,4", "x.py"), "procs", "2,4"),
        (("verify", "x.py", "--num_processes=2,4"), "procs", "2,4"),
        (("verify", "--engine", "ddp", "x.py"), "engines", "ddp"),
        (("submit", "slurm", "--nodes", "3", "x.py"), "nodes", 3),
        (("submit", "slurm", "--num-machines", "3", "x.py"), "nodes", 3),
        (("merge_weights", "a", "b"), "output_path", "b"),
        (("merge-weights", "a", "b", "--unsafe-serialization"), "unsafe_serialization", True),
    ],
)
def test_other_names_and_spellings_still_work(argv: tuple[str, ...], name: str | None, expected: object) -> None:
    found: click.Command = cli
    context = click.Context(cli, **cli.context_settings)
    for number, word in enumerate(argv):
        if not isinstance(found, click.Group):
            break
        below = found.get_command(context, word.replace("_", "-"))
        assert below is not None
        found, rest = below, [*argv[number + 1 :]]
    if name is None:
        with pytest.raises(click.exceptions.Exit):
            found.make_context("x", rest, parent=context)
    else:
        assert found.make_context("x", rest, parent=context).params[name] == expected


def test_both_spellings_are_accepted() -> None:
    for spelling in ("--num_processes", "--num-processes"):
        parent = click.Context(cli, **cli.context_settings)
        context = command.make_context("launch", [spelling, "2", "train.py"], parent=parent)
        assert context.params["num_processes"] == "2"


def test_every_description_is_a_sentence_of_its_own() -> None:
    context = click.Context(command)
    for name, option in _options().items():
        record = option.get_help_record(context)
        if record is not None:
            assert re.fullmatch(r"[A-Z0-9a-z].{14,}[.)]", record[1], flags=re.DOTALL), (name, record[1])
            assert "[" not in record[1], (name, record[1])


def test_the_flags_of_the_launcher_are_those_that_scripts_seldom_have() -> None:
    assert {"num_processes", "stall_timeout", "num_machines", "multi_gpu"} <= PROCESS_FLAGS
    assert not {"engine", "log_dir", "debug", "cpu"} & PROCESS_FLAGS


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "is_terminal", "expected"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "FORCE_COLOR": "1"}, False, True),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colours(variables: dict[str, str], is_terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = _Terminal() if is_terminal else io.StringIO()
    assert terminal.has_colour(stream) is expected
    terminal.say("a\n  do:    b", kind="error", stream=stream)
    assert ("\x1b[1;31mechelon:\x1b[0m a\n  \x1b[1mdo:\x1b[0m    b" in stream.getvalue()) is expected


def test_help_has_colours_only_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1mThis machine:\x1b[0m" in _page(capsys, "launch", "--help")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in _page(capsys, "launch", "--help")


def test_a_message_erases_an_unfinished_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = _Terminal()
    terminal.say("restart 1 of 2", stream=stream)
    assert stream.getvalue() == "\r\x1b[Kechelon: restart 1 of 2\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_message_starts_on_a_new_line_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        terminal.say("first", stream=file)
        file.write("\r 5%|#    | 1/20")
        file.flush()
        terminal.say("second", stream=file)
    assert path.read_bytes() == b"echelon: first\n\r 5%|#    | 1/20\nechelon: second\n"


def test_a_note_is_printed_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [launch._is_first_time("a"), launch._is_first_time("a"), launch._is_first_time("b")] == [True, False, True]
    monkeypatch.setattr(launch.platform, "node", lambda: "another")
    assert launch._is_first_time("a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert [launch._is_first_time("a"), launch._is_first_time("a")] == [True, True]


def test_lines_are_wrapped_by_columns() -> None:
    assert wrap("one two three", 9) == ["one two", "three"]
    assert wrap("\u4e2d\u6587\u4e2d\u6587\u3002", 8) == ["\u4e2d\u6587\u4e2d", "\u6587\u3002"]
    assert wrap("", 9) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["la"], ["plain,launch"]),
        (["launch", "--num_p"], ["plain,--num_processes"]),
        (["launch", "--num-p"], ["plain,--num-processes"]),
        (["launch", "--mixed_precision", "b"], ["plain,bf16"]),
        (["launch", "--log_dir", "out"], ["dir,out"]),
        (["launch", "--config_file", "run"], ["file,run"]),
        (["launch", "--num_processes", "2", "tr"], ["file,tr"]),
        (["config", "explain", "--ch"], ["plain,--changed"]),
        (["completion", "f"], ["plain,fish"]),
        (["launch", "--engine", "z"], ["plain,zero1"]),
        (["report", "out"], ["dir,out"]),
        (["checkpoint", "show", "out"], ["dir,out"]),
    ],
)
def test_completion(
    words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["echelon", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit):
        _run([])
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_line_and_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, line = _page(capsys, "completion", shell).splitlines()
    assert file.startswith("# ~/.")
    assert f"echelon completion {shell} --script" in line
    script = _page(capsys, "completion", shell, "--script")
    assert f"{VARIABLE}={shell}_complete" in script


def test_the_completed_engines_are_those_of_the_registry() -> None:
    found = complete_engines(click.Context(command), command.params[0], "")
    assert [item.value for item in found][: len(ENGINES)] == list(ENGINES)
