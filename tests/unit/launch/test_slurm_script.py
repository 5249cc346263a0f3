"""echelon submit slurm: the batch script says what was asked for, and does it, run by bash with programs in place of Slurm's."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from echelon.base import environ
from echelon.cli.main import _run

# srun notes its words (with 0 between them) and the token's file, prints, and ends as it is told; scontrol notes its words.
SRUN = r"""#!/bin/bash
printf '%s\0' "$@" > "$NOTES/srun"
if [ -n "${ECHELON_TOKEN_FILE:-}" ]; then
    stat -c %a "$ECHELON_TOKEN_FILE" > "$NOTES/mode"
    cp "$ECHELON_TOKEN_FILE" "$NOTES/token"
    env > "$NOTES/environment"
fi
[ ! -e "$NOTES/slow" ] || { : > "$NOTES/running"; sleep 0.2; }
exit "${END:-0}"
"""
SCONTROL = '#!/bin/bash\necho "$@" > "$NOTES/scontrol"\n'
SBATCH = '#!/bin/bash\necho "$@" > "$NOTES/sbatch"\ncat > "$NOTES/script"\necho "42;cluster"\n'


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a script, with Slurm's programs on the path."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "sbatch": SBATCH}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _written(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert _run(["submit", "slurm", "--dry_run", *argv]) == 0
    return capsys.readouterr().out


def _execute(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash"], input=script, env={**environ.snapshot(), **variables}, capture_output=True, text=True, check=False
    )


def _words(site: Path) -> list[str]:
    return (site / "srun").read_text().split("\0")[:-1]


def test_the_job_requests_the_given_resources(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _written(
        capsys,
        *("--nodes", "2", "--gpus_per_node", "8", "--cpus-per-task", "64", "--mem", "500G", "--time", "1-12"),
        *("--partition", "gpu", "--account", "me", "--qos", "high", "--constraint", "a100&ib", "--job_name", "a b"),
        *("--log_dir", "logs%1", "--signal", "TERM@90", "--sbatch=--exclusive", "train.py"),
    )
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name='a b'",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
        "--mem=500G",
        "--time=1-12",
        "--partition=gpu",
        "--account=me",
        "--qos=high",
        "--constraint='a100&ib'",
        f"--output={site}/logs%%1/%x-%j.out",
        "--open-mode=append",
        "--signal=TERM@90",
        "--requeue",
        "--exclusive",
    ]
    assert not (site / "logs%1").exists()  # a dry run leaves nothing


def test_arguments_are_passed_unchanged(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = ["a b", "c'd", '"$HOME"', "`id`", "$(id)", "-x", "", "\n"]
    (site / "my venv").write_text("export ORDER=${ORDER}s\n")
    text = _written(
        capsys,
        *(
            "--env",
            "ORDER=$(id) 'x",
            "--setup",
            "source 'my venv'",
            "--python",
            "/opt/a b/python",
            "--nproc_per_node=2",
        ),
        *("--srun", "--container-image='a b' --label", "--launch_args", "--parity exact --summary", "train.py", *odd),
    )
    done = _execute(text.replace("\nsrun", '\necho "$ORDER"\nsrun'))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "$(id) 'xs\n")
    assert _words(site) == [
        *("--kill-on-bad-exit=0", "--ntasks-per-node=1", "--wait=0", "--container-image=a b", "--label"),
        *("/opt/a b/python", "-m", "echelon", "launch", "--nproc_per_node", "2"),
        *("--parity", "exact", "--summary", "train.py", *odd),
    ]


def test_direct_starts_the_ranks_and_a_module_is_one(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _written(
        capsys,
        *("--direct", "--gpus_per_node", "4", "--cpus_per_task", "7", "--nodes", "2"),
        *("--python", "python", "-m", "pydoc", "--lr", "1"),
    )
    assert "#SBATCH --ntasks-per-node=4\n" in text
    assert _execute(text).returncode == 0
    wait = ["--kill-on-bad-exit=0", "--wait=300", "--cpus-per-task=7"]
    assert _words(site) == [*wait, "python", "-m", "pydoc", "--lr", "1"]
    assert not (site / "token").exists()  # no launcher that could ask for it


def test_the_job_is_requeued_only_after_a_termination_signal(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, again = _written(capsys, "train.py"), site / "scontrol"
    for code in (0, 1, 130):
        assert _execute(text, END=str(code)).returncode == code
        assert not again.exists()
    done = _execute(text, END="143")
    assert (done.returncode, again.read_text()) == (143, "requeue 42\n")
    assert "requeueing this job" in done.stderr
    again.unlink()
    assert _execute(_written(capsys, "--no_requeue", "train.py"), END="143").returncode == 143
    assert not again.exists()


@pytest.mark.parametrize("flags", [[], ["--no_requeue"]])
def test_when_slurm_ends_the_job_the_script_waits_and_leaves_the_rest_to_slurm(
    site: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    (site / "slow").touch()
    process = subprocess.Popen(
        ["bash", "-c", _written(capsys, *flags, "train.py")], env={**environ.snapshot(), "END": "143"}
    )
    while not (site / "running").exists():
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 143  # that of srun, which it waited for; -15 if the signal had ended it
    assert not (site / "scontrol").exists()


def test_the_machines_share_a_secret_that_is_nowhere_else(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _written(capsys, "--nodes", "2", "--log_dir", "my logs", "train.py")
    logs = site / "my logs"
    logs.mkdir()
    (logs / ".token-42.killed12").write_text("of a start that was killed")
    tokens = set()
    for _ in range(2):
        # As the shell shows each command that it runs, words expanded.
        done = _execute("set -x\n" + text, ECHELON_TOKEN="of the shell")
        assert done.returncode == 0
        token = (site / "token").read_text()
        assert (len(token), (site / "mode").read_text()) == (64, "600\n")
        assert int(token, 16)
        for told in (text, done.stdout, done.stderr, (site / "environment").read_text(), *_words(site)):
            assert token not in told
        assert "ECHELON_TOKEN=" not in (site / "environment").read_text()
        assert list(logs.iterdir()) == []
        tokens.add(token)
    assert len(tokens) == 2
    assert "TOKEN" not in _written(capsys, "train.py")  # one machine needs none


def test_it_is_submitted(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["submit", "slurm", "--log_dir", "logs", "--job_name", "mine", "train.py"]) == 0
    assert capsys.readouterr().out == f"submitted job 42; its output goes to {site}/logs/mine-42.out\n"
    assert (site / "sbatch").read_text() == "--parsable\n"
    assert (site / "script").read_text() == _written(capsys, "--log_dir", "logs", "--job_name", "mine", "train.py")
    assert (site / "logs").is_dir()


def test_it_is_written_to_a_file(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["submit", "slurm", "--output", "job.sh", "train.py"]) == 0
    assert (site / "job.sh").read_text() == _written(capsys, "train.py")
    assert not (site / "sbatch").exists()
    assert stat.S_ISREG((site / "job.sh").stat().st_mode)


def test_errors_of_sbatch_are_reported(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "bin" / "sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n"
    )
    assert _run(["submit", "slurm", "--partition", "x", "train.py"]) == 1
    assert "sbatch failed (exit code 1): sbatch: error: invalid partition" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(site))
    assert _run(["submit", "slurm", "train.py"]) == 1
    told = capsys.readouterr().err
    assert "sbatch is not installed on this machine" in told
    assert "login node" in told


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["none.py"], ["the script none.py does not exist"]),
        (["--time", "2h", "train.py"], ["'2h' is not a valid value for Slurm", "flag --time", "12:00:00"]),
        (["--mem", "64GB", "train.py"], ["'64GB' is not a valid value for Slurm", "flag --mem", "64G"]),
        (["--signal", "KILL@60", "train.py"], ["'KILL@60'", "flag --signal"]),
        (
            ["--signal", "USR1@25", "train.py"],
            ["the signal is sent 25 s before", "the ranks may take 25 s", "more than 25 s"],
        ),
        (["--launch_args=--preemption_grace 200", "train.py"], ["the ranks may take 200 s"]),
        (["--time", "2", "train.py"], ["a time limit of 120 s and a signal 120 s before it", "--signal none"]),
        (["--env", "X", "train.py"], ["'X' has no '='", "flag --env"]),
        (["--env", "A B=1", "train.py"], ["'A B'", "flag --env"]),
        (["--job_name", "a\nb", "train.py"], ["'a\\nb' contains a line break", "flag --job_name"]),
        (["--sbatch", "--x\n--y", "train.py"], ["contains a line break", "flag --sbatch"]),
        (
            ["--nproc_per_node", "9", "--gpus_per_node", "8", "train.py"],
            ["9 processes per machine were requested, but only 8 GPUs"],
        ),
        (["--launch_args=--partity exact", "train.py"], ["unknown flag --partity", "--parity"]),
        (["--launch_args", "train.py", "train.py"], ["'train.py' is not a flag of echelon launch"]),
        (["--direct", "--launch_args=--summary", "train.py"], ["--launch_args requires echelon launch"]),
        (["--output", "job-%j.out", "train.py"], ["the file for the batch script", "--log_dir"]),
        (["--partitoin", "gpu", "train.py"], ["unknown flag --partitoin", "--partition"]),
        (["-m", "--no_python", "train.py"], ["--module and --no_python are mutually exclusive"]),
        (["--dry_run", "--output", "job.sh", "train.py"], ["--dry_run and --output are mutually exclusive"]),
    ],
)
def test_invalid_settings_are_reported_before_submission(
    site: Path, capsys: pytest.CaptureFixture[str], argv: list[str], texts: list[str]
) -> None:
    assert _run(["submit", "slurm", *argv]) == 2
    told = capsys.readouterr().err
    assert [text for text in texts if text not in told] == [], told
    assert not (site / "sbatch").exists()


@pytest.mark.parametrize(
    ("time", "is_long"),
    [
        ("3", True),
        ("2:01", True),
        ("2:00", False),
        ("0:2:1", True),
        ("0-0:2", False),
        ("0-1", True),
        ("infinite", True),
    ],
)
def test_a_time_is_parsed_like_slurm(site: Path, capsys: pytest.CaptureFixture[str], time: str, is_long: bool) -> None:
    assert _run(["submit", "slurm", "--dry_run", "--time", time, "train.py"]) == (0 if is_long else 2)
    capsys.readouterr()
