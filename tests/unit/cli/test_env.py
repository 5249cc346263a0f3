"""``echelon env`` shows what a bug report needs, and no secret of anybody."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from echelon._version import __version__
from echelon.cli.env import system, without_home
from echelon.cli.main import cli

SECRET = "s3cret"


@pytest.fixture
def _planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret in the environment, in the settings, in the names of the home and of the user."""
    home = tmp_path / f"home-{SECRET}"
    (home / "venv/bin").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", f"{home}/venv/bin/python")
    values = {
        "HOME": str(home),
        "LOGNAME": f"{SECRET}-user",
        "XDG_CONFIG_HOME": str(home),
        "HF_HOME": str(home),
        "HF_TOKEN": SECRET,
        "WANDB_API_KEY": SECRET,
        "ECHELON_TOKEN": SECRET,
        "NCCL_NET_PLUGIN": f"/opt/{SECRET}",
        "OMP_NUM_THREADS": "3",
        "NCCL_DEBUG": SECRET,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MASTER_ADDR": SECRET,
        "SLURM_JOB_ID": SECRET,
        "ECHELON_LOG_LEVEL": "INFO",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def _report(*flags: str) -> str:
    result = CliRunner().invoke(cli, ["env", *flags])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("_planted")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_no_secret_is_printed(flags: tuple[str, ...]) -> None:
    Path("echelon.toml").write_text(
        f'num_processes = 2\nmain_process_ip = "{SECRET}"\ndeepspeed_config_file = "{SECRET}.json"\nmixed_precision = "bf16"\n',
        encoding="utf-8",
    )
    report = _report(*flags)
    assert SECRET not in report
    lines = " ".join(report.replace('"', "").split())
    for part in (
        f"echelon{':' if flags else ''} {__version__}",
        "~/venv/bin/python",
        "2 (file echelon.toml:1)",
        "(text) (file echelon.toml:2)",
        "'bf16' (file echelon.toml:4)",
    ):
        assert part in lines, report
    if flags:
        told = json.loads(report)
        names = (
            "ECHELON_TOKEN",
            "NCCL_DEBUG",
            "NCCL_NET_PLUGIN",
            "OMP_NUM_THREADS",
            "CUDA_VISIBLE_DEVICES",
            "MASTER_ADDR",
        )
        assert [told["variables"][name] for name in names] == ["(set)", "(set)", "(set)", "3", "0,1", "(set)"]
        assert not {"HF_TOKEN", "WANDB_API_KEY"} & told["variables"].keys()
        assert told["started by"] == "slurm"
        assert {"system", "kernel", "cpu", "cores", "memory", "open files"} <= told["system"].keys()
        assert {"backends", "torch built with"} <= told["devices"].keys()
        assert any("loopback" in kinds for kinds in told["network"].values())
        assert not any("127.0.0.1" in kinds for kinds in told["network"].values())


@pytest.mark.usefixtures("_planted")
@pytest.mark.parametrize("line", [f'hub_token = "{SECRET}"', f'num_processes = "{SECRET}"', f'[x]\ny = "{SECRET}"'])
def test_an_invalid_file_is_named_without_its_contents(line: str) -> None:
    Path("echelon.toml").write_text(f"cpu = true\n{line}\n", encoding="utf-8")
    report = _report()
    assert SECRET not in report
    assert "settings: invalid (file echelon.toml:" in report


def test_addresses_are_shown_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "run.toml").write_text('main_process_ip = "10.1.2.3"\n', encoding="utf-8")
    report = _report("--addresses", "--config_file", str(tmp_path / "run.toml"))
    assert "127.0.0.1" in report
    assert "'10.1.2.3'" in report


def test_container_limits_are_shown(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "proc/meminfo": "MemTotal:       2048000 kB\nMemAvailable:   1024000 kB\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU of 1 GHz\n",
        "sys/fs/cgroup/job/memory.max": "1000000\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/memory.max": "2000000\n",
        "sys/fs/cgroup/job/step/cpu.max": "100000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = system(tmp_path)
    assert found["cpu"] == "A CPU of 1 GHz"
    assert found["memory"] == "1.95 GB, 1000.0 MB available"
    assert found["cgroup limits"] == "memory.max 1000000, cpu.max 100000 100000"
    assert found["cores"].endswith(" 1 usable")
    assert "/dev/shm" in found


def test_the_home_directory_is_replaced_only_as_a_path_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("LOGNAME", "ann")
    assert without_home("/root/x and /opt/root/x, /rooted, file /root") == "~/x and /opt/root/x, /rooted, file ~"
    assert without_home("/scratch/ann/x /scratch/anna") == "/scratch/USER/x /scratch/anna"
