"""A Slurm of our own: munged, slurmctld and a slurmd for each of two machines that are this one, on loopback, for some tests."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from echelon.base import environ

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
_PATH = f"{environ.get('PATH')}:/usr/sbin"  # where the daemons are
_USER = getpass.getuser()
_FOREIGN = ("ECHELON_", "ACCELERATE_", "SLURM_", "SBATCH_", "GLOO_", "NCCL_", "MASTER_", "TORCHELASTIC_")

# Loopback only; no cgroups, no accounts; a job that is put back starts when its credential has expired (5 s is the least).
# Processors are counted as they are told, not as they are: the ranks of two jobs share what there is.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
KillWait=30
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 State=UNKNOWN
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return what is not installed of Slurm and munge."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


@final
class Slurm:
    """The daemons, as long as the ``with`` block; and what a user of the cluster does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        host = socket.gethostname().partition(".")[0]
        self.folder.mkdir(parents=True)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        text = _CONFIGURATION.format(
            host=host, second=f"{host}-b", folder=self.folder, ports=_free_ports(3), user=_USER
        )
        (self.folder / "slurm.conf").write_text(text)
        try:
            files = [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "seed", "log")]
            # Pytest's folders are their owner's alone; munged wants others to reach its socket, unless it is forced.
            self._start(
                "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", f"--key-file={key}", *files
            )
            self._wait_for("munged", (self.folder / "munge.socket").exists)
            self._start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
            for node in (host, f"{host}-b"):
                self._start("slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))
            idle = ["idle", "2"]
            self._wait_for("two machines", lambda: self.ask("sinfo", "-h", "-o", "%T %D", check=False).split() == idle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._daemons:
            self.ask("scancel", f"--user={_USER}", check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *argv: str, check: bool = True) -> str:
        """Run a program of Slurm's (or echelon's) and return what it prints."""
        done = subprocess.run(
            argv, env=self.environment(), cwd=self.folder, capture_output=True, text=True, check=False, timeout=120
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}{done.stdout}"
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Return the environment of a user of this cluster."""
        inherited = {name: value for name, value in environ.snapshot().items() if not name.startswith(_FOREIGN)}
        inherited = {
            name: value for name, value in inherited.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        return {**inherited, "PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), "CUDA_VISIBLE_DEVICES": ""}

    def state(self, job: str) -> tuple[str, int]:
        """Return the state of a job, such as RUNNING, and how often it was put back."""
        told = self.ask("scontrol", "show", "job", job)
        found = {name: re.search(rf"\b{name}=(\S+)", told) for name in ("JobState", "Restarts")}
        assert all(found.values()), told
        return str(found["JobState"][1]), int(found["Restarts"][1])  # type: ignore[index]

    def finish(self, job: str, output: Path, *, within_s: float = 240.0) -> str:
        """Wait for the job's end; return what it printed, which must be that of a job that went well."""

        def is_over() -> bool:
            return self.state(job)[0] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED")

        wait_for(f"the end of job {job}", is_over, within_s=within_s)
        text = output.read_text()
        assert self.state(job)[0] == "COMPLETED", text
        return text

    def _wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        def is_so_or_dead() -> bool:
            for daemon in self._daemons:
                log = self.folder / f"{daemon.args[0]}.out"  # type: ignore[index]
                assert daemon.poll() is None, log.read_text()
            return is_so()

        wait_for(what, is_so_or_dead)

    def _start(self, *argv: str) -> None:
        with (self.folder / f"{argv[0]}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment())
            )


def wait_for(what: str, is_so: Callable[[], bool], *, within_s: float = 120.0) -> None:
    """Wait until ``is_so()``."""
    until = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            held.append(socket.create_server(("127.0.0.1", 0)))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
