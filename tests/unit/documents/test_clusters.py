"""docs/clusters.md: its commands are taken as they stand there, and what it names exists.

Its example for Ray: tests/unit/launch/test_ray.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from echelon.cli.launch import command as launch
from echelon.cli.main import _run
from echelon.cli.submit import command as submit
from echelon.launch.schedulers.slurm_script import WAIT_S

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
COMMANDS = re.findall(r"^\$ echelon (.*)$", PAGE, re.MULTILINE)
TAKES_ALL = "#!/bin/bash\ncat > /dev/null\necho 7\n"


def test_there_are_commands_for_both() -> None:
    kinds = [line.split()[1] for line in COMMANDS]
    assert (kinds.count("slurm"), kinds.count("kubernetes")) == (3, 3)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_accepted(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "kubectl"):
        (tmp_path / "bin" / name).write_text(TAKES_ALL)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert _run(shlex.split(line)) == 0, capsys.readouterr().err
    capsys.readouterr()


def test_the_srun_line_is_accepted_by_the_launcher() -> None:
    (line,) = re.findall(r"^srun --ntasks-per-node=1 echelon launch (.*)$", PAGE, re.MULTILINE)
    settings = {"token_normalize_func": lambda name: name.replace("_", "-")}
    told = launch.make_context("launch", shlex.split(line), **settings).params
    assert (told["script"], told["num_processes"], told["num_machines"]) == ("train.py", "8", None)


def test_every_named_flag_exists() -> None:
    ours = {flag for sub in submit.commands.values() for p in sub.params for flag in (*p.opts, *p.secondary_opts)}
    ours |= {flag for p in launch.params for flag in p.opts}
    theirs = {"--ntasks-per-node", "--exclusive", "--container-image", "--from-file"}
    named = {flag.replace("_", "-") if flag not in theirs else flag for flag in re.findall(r"--[a-z][-_a-z]+", PAGE)}
    assert named - ours - theirs - {"--lr", "--out"} == set()  # the last two are the script's


def test_the_numbers_match_the_program() -> None:
    defaults = {p.name: p.default for sub in submit.commands.values() for p in sub.params}
    assert f"by default `{defaults['signal']}`" in TEXT
    assert f"`--grace` seconds ({defaults['grace']} by default)" in TEXT
    assert f"run as user {defaults['user']}" in TEXT
    assert f"or are stopped {WAIT_S} s after the first task" in TEXT


def test_the_versions_are_the_tested_ones() -> None:
    requirements = (ROOT / "tests" / "clusters" / "requirements.txt").read_text()
    (ray,) = re.findall(r"^ray\[train\]==(\d+\.\d+)", requirements, re.MULTILINE)
    assert f"With Ray {ray}, " in TEXT
    maker = (ROOT / "tests" / "data" / "make_cluster_schemas.py").read_text()
    kubernetes, kubeflow = re.findall(r"==(\d+\.\d+)\.\d+", maker)
    assert f"Kubernetes {kubernetes} and Kubeflow Trainer {kubeflow}" in TEXT
