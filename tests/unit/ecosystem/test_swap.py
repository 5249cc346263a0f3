"""Echelon stands in for accelerate and transformers: in a process, in those that it spawns, and in a launched run.

The libraries here are small stand-ins with the structure of the real ones; tests/ecosystem runs the real ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.base import environ
from echelon.base.errors import LaunchError
from echelon.cli.main import _run
from echelon.commands.launch import launch_command, launch_command_parser
from echelon.ecosystem import swap
from echelon.launch.node import GenerationResult, RunOver

FILES = {
    # An older release than the one whose names echelon has. It must never be imported.
    "accelerate/__init__.py": "raise RuntimeError('the real accelerate was imported')",
    "accelerate-0.30.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: accelerate\nVersion: 0.30.0\n",
    "transformers/__init__.py": """
        import importlib
        SOURCES = {"Trainer": "trainer", "TrainerCallback": "trainer_callback", "TrainingArguments": "training_args"}
        def __getattr__(name):
            if name not in SOURCES:
                raise AttributeError(name)
            return getattr(importlib.import_module(f"transformers.{SOURCES[name]}"), name)
    """,
    "transformers/trainer_callback.py": "class TrainerCallback: pass\nclass Untouched: pass",
    "transformers/trainer_utils.py": """
        import enum
        class IntervalStrategy(str, enum.Enum):
            STEPS = "steps"
    """,
    "transformers/training_args.py": """
        from .trainer_utils import IntervalStrategy
        class TrainingArguments: pass
    """,
    "transformers/trainer.py": """
        from accelerate import Accelerator
        from .trainer_callback import TrainerCallback, Untouched
        from .training_args import TrainingArguments
        class Trainer: pass
        def arguments_class(): return TrainingArguments
    """,
    "tuner.py": """
        from accelerate.utils import gather_object
        from transformers import Trainer, TrainerCallback, TrainingArguments
        from transformers.trainer import Untouched
        class Tuner(Trainer): pass
        class Watch(TrainerCallback): pass
    """,
}

FACTS = """
import json, sys

def facts():
    import importlib.metadata, importlib.util, inspect
    import accelerate, accelerate.utils, accelerate.utils.operations as operations, echelon, tuner
    import transformers, transformers.trainer
    from accelerate.data_loader import prepare_data_loader
    absent = {}
    for name in ("accelerate.test_utils", "accelerate.trainer", "accelerate.utils.no_such"):
        absent[name] = importlib.util.find_spec(name) is None
    return {
        "version": accelerate.__version__,
        "metadata": importlib.metadata.version("accelerate"),
        "distribution": importlib.metadata.packages_distributions()["accelerate"][0],
        "found": importlib.util.find_spec("accelerate") is not None,
        "same modules": accelerate.utils is echelon.utils and operations is sys.modules["echelon.utils.operations"],
        "same names": accelerate.Accelerator is echelon.Accelerator and accelerate.is_rich_available() in (True, False),
        "other names": [name for name in ("Trainer", "World") if hasattr(accelerate, name)],
        "absent": absent,
        "trainer": transformers.Trainer is transformers.trainer.Trainer is echelon.Trainer is tuner.Trainer,
        "subclass": issubclass(tuner.Tuner, echelon.Trainer) and issubclass(tuner.Tuner, transformers.Trainer),
        "callback": isinstance(tuner.Watch(), echelon.TrainerCallback),
        "arguments": transformers.trainer.arguments_class() is echelon.TrainingArguments is transformers.TrainingArguments,
        "untouched": tuner.Untouched.__module__,
        "source": "def arguments_class" in inspect.getsource(transformers.trainer),
        "names of echelon": echelon.__version__ != accelerate.__version__ and echelon.utils.__spec__.name,
    }

def child(queue):
    queue.put(facts())

def main():
    if len(sys.argv) > 1:
        print("FACTS", json.dumps([facts()]))
        return
    import multiprocessing
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    spawned = queue.get()
    process.join()
    print("FACTS", json.dumps([facts(), spawned]))

import tuner  # outside of main, so that a spawned process imports it before its function is known
if __name__ == "__main__":
    main()
"""

EXPECTED = {
    "version": "1.15.0",
    "metadata": "1.15.0",
    "distribution": "accelerate",
    "found": True,
    "same modules": True,
    "same names": True,
    "other names": [],
    "absent": {"accelerate.test_utils": True, "accelerate.trainer": True, "accelerate.utils.no_such": True},
    "trainer": True,
    "subclass": True,
    "callback": True,
    "arguments": True,
    "untouched": "transformers.trainer_callback",
    "source": True,
    "names of echelon": "echelon.utils",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the stand-ins, and the program."""
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_dedent(text))
    (tmp_path / "program.py").write_text(FACTS)
    return tmp_path


def _dedent(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(line.removeprefix("        ") for line in lines) + "\n"


def _python(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != swap.VARIABLE}
    return subprocess.run(
        [sys.executable, *argv], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**variables, "PYTHONPATH": str(folder / "site"), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def _facts(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("FACTS ")[2])


@pytest.mark.slow
def test_install_in_the_first_line_covers_the_process_and_those_that_it_spawns(site: Path) -> None:
    first = 'import echelon.compat; echelon.compat.install(); echelon.compat.install("accelerate")\n'
    (site / "program.py").write_text(first + FACTS)
    done = _python(site, "program.py")
    assert _facts(done) == [EXPECTED, EXPECTED]
    said = "echelon: stands in for accelerate 1.15.0 and transformers' Trainer (echelon.compat.install)\n"
    assert done.stderr.count(said) == 1  # neither the second call nor the spawned process repeat it


@pytest.mark.slow
def test_launch_as_covers_a_program_without_a_change(site: Path) -> None:
    flags = ["--as", "accelerate,transformers", "--cpu", "--num_processes", "1"]
    done = _python(site, "-m", "echelon", "launch", *flags, "program.py", "alone")
    assert _facts(done) == [EXPECTED]
    assert done.stderr.count("echelon: stands in for accelerate 1.15.0 and transformers' Trainer (flag --as)\n") == 1
    assert "echelon.compat.install" not in done.stderr


def test_accelerate_need_not_be_installed(tmp_path: Path) -> None:
    source = Path(swap.__file__).parents[2]
    program = (
        f"import sys; sys.path = [{str(source)!r}] + [folder for folder in sys.path if 'site-packages' not in folder]\n"
        "import importlib.util; assert importlib.util.find_spec('accelerate') is None\n"
        "from echelon.ecosystem import swap; swap._add(('accelerate',))\n"
        "import importlib.metadata, accelerate, accelerate.commands\n"
        "print(accelerate.__version__, importlib.metadata.version('accelerate'), accelerate.__file__)"
    )
    done = _python(tmp_path, "-c", program)
    assert done.stdout.split()[:2] == ["1.15.0", "1.15.0"], done.stderr
    assert done.stdout.split()[2] == str(source / "echelon" / "__init__.py")


def test_a_library_that_is_already_imported_is_named_with_its_users(site: Path) -> None:
    (site / "site" / "accelerate" / "__init__.py").write_text("class Accelerator: pass\n")
    (site / "site" / "loops.py").write_text("from accelerate import Accelerator\n")
    program = "import loops, echelon.compat\n\n\nechelon.compat.install('accelerate')\n"
    (site / "late.py").write_text(program)
    done = _python(site, "late.py")
    assert done.returncode == 1
    assert "accelerate is already imported, and used by loops, so echelon can no longer stand in for it" in done.stderr
    assert f"where: {site / 'late.py'}:4" in done.stderr
    assert "call echelon.compat.install() before these imports" in done.stderr


@pytest.mark.slow
def test_nothing_of_it_is_loaded_without_a_call(site: Path) -> None:
    program = (
        "import sys, echelon, echelon.compat, echelon.cli.launch, echelon.cli.env; from echelon.compat import enums\n"
        "print(len(sys.meta_path), 'install' in dir(echelon.compat),\n"
        "  sorted({'echelon.ecosystem.swap', 'importlib.metadata', 'accelerate'} & {*sys.modules} - loaded))"
    )
    known = "import click, sys, importlib.metadata; loaded = {*sys.modules}; before = len(sys.meta_path)\n"
    done = _python(site, "-c", known + program.replace("len(sys.meta_path)", "len(sys.meta_path) - before"))
    assert done.stdout.strip() == "0 True []", done.stderr


@pytest.mark.parametrize(
    ("argv", "problem", "do"),
    [
        (["--as", "lightning", "program.py"], "echelon cannot stand in for 'lightning'", "use accelerate or accelerate,transformers"),
        (["--as", "transformers", "program.py"], "together with accelerate", "accelerate,transformers"),
        (["--as", "accelerate", "--no_python", "true"], "flag --as requires a Python script", "remove one of the two"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_an_error(
    argv: list[str],
    problem: str,
    do: str,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(site)
    assert _run(["launch", "--cpu", *argv]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert do in said


@pytest.mark.parametrize("by_flag", [True, False])
def test_the_ranks_are_told_by_a_variable(
    by_flag: bool, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(job: Any, *_: Any) -> None:
        assert job.environment["ECHELON_AS"] == "accelerate,transformers"
        raise LaunchError("the ranks are started")

    monkeypatch.chdir(site)
    monkeypatch.setattr("echelon.cli.launch.run_job", start)
    flags = ["--as=transformers,accelerate"] if by_flag else []
    with environ.patch({"ECHELON_AS": None if by_flag else "accelerate, transformers"}):
        assert _run(["launch", "--cpu", "--num_processes=1", *flags, "program.py"]) == 1
    said = capsys.readouterr().err
    assert "the ranks are started" in said
    assert (
        f"stands in for accelerate 1.15.0 and transformers' Trainer ({'flag --as' if by_flag else 'env ECHELON_AS'})"
        in said
    )
    assert "ignoring unknown" not in said


def test_the_launcher_can_be_started_from_python(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As trl's command line does."""

    def start(job: Any, *_: Any) -> Any:
        jobs.append(job)
        raise RunOver(GenerationResult(then="done", code=code))

    jobs: list[Any] = []
    monkeypatch.chdir(site)
    monkeypatch.setattr("echelon.cli.launch.run_job", start)
    parser = launch_command_parser()
    args = parser.parse_args(["--num_processes", "1", "--cpu", "--mixed-precision=bf16", "program.py", "--cpu", "-m"])
    args.num_processes = "2"
    with environ.patch({"ECHELON_AS": "accelerate"}):
        code = 0
        launch_command(args)
        code = 3
        with pytest.raises(SystemExit) as end:
            launch_command(args)
    assert end.value.code == 3
    job = jobs[0]
    assert (job.script.target, job.script.args, job.num_processes) == ("program.py", ("--cpu", "-m"), 2)
    assert job.environment["ECHELON_AS"] == "accelerate"
    parsers = argparse.ArgumentParser()
    launch_command_parser(parsers.add_subparsers())
    assert parsers.parse_args(["launch", "program.py"]).func is launch_command


@pytest.mark.parametrize("is_strict", [True, False])
def test_strict_is_passed_to_the_ranks(is_strict: bool, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(job: Any, *_: Any) -> None:
        assert job.environment.get("ECHELON_STRICT") == ("1" if is_strict else None)
        raise LaunchError("the ranks are started")

    monkeypatch.chdir(site)
    monkeypatch.setattr("echelon.cli.launch.run_job", start)
    assert _run(["launch", "--cpu", "--num_processes=1", *(["--strict"] if is_strict else []), "program.py"]) == 1


def test_env_tells_which_libraries_echelon_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    for value, expected in (
        (None, "none (echelon launch --as and echelon.compat.install replace accelerate and transformers' Trainer)"),
        ("accelerate", "accelerate 1.15.0 (env ECHELON_AS)"),
        ("a secret", "invalid (env ECHELON_AS)"),
    ):
        with environ.patch({"ECHELON_AS": value}):
            assert _run(["env"]) == 0
        assert f"libraries that echelon replaces: {expected}\n" in capsys.readouterr().out


def test_the_names_are_those_of_accelerate() -> None:
    peer = pytest.importorskip("accelerate")
    assert peer.__version__ == swap.ACCELERATE_VERSION
    modules = {name for name in dir(peer) if type(getattr(peer, name)) is type(sys)}
    names = {name for name in dir(peer) if not name.startswith("_")} - modules
    assert names == set(swap._SOURCES)
