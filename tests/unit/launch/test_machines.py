"""From a command line or a file to a meeting: who listens, where the others go, how many processes each machine has."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from echelon.base.errors import ConfigError, LaunchError
from echelon.cli.launch import per_machine
from echelon.config.files import from_file
from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import from_flags
from echelon.launch.environment import interface_variables
from echelon.launch.multinode.machines import (
    CliOverrides,
    MultinodePlan,
    make_plan,
    node_range,
    parse_rdzv_conf,
)
from echelon.launch.multinode.network import addresses_of, interface_of, is_loopback, own_address_towards
from echelon.launch.schedulers.slurm import Step

TOKEN = "a token of some length"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_TOKEN", TOKEN)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.2", 0))  # not listening, and not on the address that is tried: only the number is wanted
        yield sock.getsockname()[1]


def settings(**values: object) -> Resolved[RunConfig]:
    return resolve(RunConfig, [from_flags({name: (value, f"--{name}") for name, value in values.items()})])


def met(resolved: Resolved[RunConfig], asked: CliOverrides = CliOverrides(), step: Step | None = None) -> MultinodePlan:  # noqa: B008 - frozen
    found = make_plan(resolved, asked, num_processes=2, step=step)
    if found.listener is not None:
        found.listener.close()
    return found


def test_accelerates_options_determine_the_rendezvous_host(port: int) -> None:
    words = {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": port}
    first = met(settings(**words, machine_rank=0))
    other = met(settings(**words, machine_rank=1))
    assert first.listener is not None
    assert other.listener is None
    assert (other.host, other.port, other.info.machine_rank, other.token) == ("127.0.0.1", port, 1, TOKEN.encode())
    assert (other.info.min_nodes, other.info.max_nodes) == (2, 2)


def test_without_a_rank_the_first_launcher_of_a_machine_listens(port: int) -> None:
    asked = CliOverrides(
        rdzv_endpoint=f"localhost:{port}", nnodes="1:4", rdzv_conf="join_timeout=7,keep_alive_interval=1"
    )
    first = make_plan(settings(num_machines=4), asked, num_processes=1, step=None)
    assert first.listener is not None
    with first.listener:
        second = met(settings(num_machines=4), asked)
        with pytest.raises(LaunchError, match="Address already in use"):
            make_plan(settings(num_machines=4, machine_rank=0), asked, num_processes=1, step=None)
    assert second.listener is None
    assert second.info.machine_rank is None
    assert (second.info.min_nodes, second.info.max_nodes) == (1, 4)
    assert (second.times.join_timeout, second.times.heartbeat) == (timedelta(seconds=7), timedelta(seconds=1))
    assert second.times.lost_after == timedelta(seconds=5)


def test_is_host_and_listen_on_override_the_address(port: int) -> None:
    asked = CliOverrides(rdzv_endpoint=f"127.0.0.1:{port}", rdzv_conf="is_host=0")
    assert met(settings(num_machines=2), asked).listener is None
    behind = CliOverrides(rdzv_endpoint=f"192.0.2.7:{port}", listen_on="127.0.0.1")
    found = met(settings(num_machines=2, machine_rank=0), behind)
    assert found.listener is not None
    with pytest.raises(ConfigError, match=r"192.0.2.7 is not one of its addresses"):
        met(settings(num_machines=2, machine_rank=0), CliOverrides(rdzv_endpoint=f"192.0.2.7:{port}"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (OSError(errno.EADDRNOTAVAIL, "while attempting to bind"), "Cannot assign requested address"),
    ],
)
def test_an_address_to_listen_on_that_is_not_of_this_machine_is_named(
    error: OSError, reason: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("echelon.launch.multinode.machines.listen", fail)
    with pytest.raises(LaunchError, match=f"cannot listen on wrong:{port}: {reason}") as raised:
        met(
            settings(num_machines=2, machine_rank=0),
            CliOverrides(rdzv_endpoint=f"127.0.0.1:{port}", listen_on="wrong"),
        )
    assert raised.value.where == "flag --listen_on"
    assert raised.value.do == "use one of this machine's addresses, as shown by `ip addr`"


def test_a_name_that_resolves_to_a_loopback_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.launch.multinode.machines.addresses_of", lambda host, where: ["127.0.1.1"])
    with pytest.raises(ConfigError, match=r"node0 resolves to the loopback address 127.0.1.1"):
        met(settings(num_machines=2), CliOverrides(rdzv_endpoint="node0:29500"))


def test_slurm_provides_missing_command_line_settings(port: int) -> None:
    step = Step(num_nodes=3, node_rank=2, head="127.0.0.1", job_id=9, step_id=0, port=port)
    found = met(settings(), step=step)
    assert (found.info.min_nodes, found.info.machine_rank, found.port, found.info.run_id) == (3, 2, port, "slurm-9")
    assert found.listener is None


def test_a_file_of_accelerates_counts_the_processes_of_all_machines(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "num_machines: 2\nmachine_rank: 1\nnum_processes: 8\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
    )
    resolved = resolve(RunConfig, [from_file(path)])
    assert per_machine(resolved, {}, CliOverrides(), 2).value.num_processes == 4
    by_flag = settings(num_processes=8, num_machines=2)
    assert per_machine(by_flag, {"num_processes": "--nproc_per_node"}, CliOverrides(), 2).value.num_processes == 8
    with pytest.raises(ConfigError, match="8 processes cannot be divided evenly among 3 machines"):
        per_machine(settings(num_processes=8, num_machines=3), {}, CliOverrides(), 3)
    with pytest.raises(ConfigError, match="on 1 to 2 machines"):
        per_machine(by_flag, {"num_processes": "--num_processes"}, CliOverrides(nnodes="1:2"), 2)


def test_ranges_and_settings_of_a_rendezvous() -> None:
    assert node_range(settings(num_machines=4), CliOverrides(nnodes="2:4")) == (2, 4)
    with pytest.raises(ConfigError, match="neither a number nor a range of machines"):
        node_range(settings(num_machines=4), CliOverrides(nnodes="5:4"))
    assert parse_rdzv_conf(CliOverrides(rdzv_conf="timeout=9,read_timeout=3")) == {
        "timeout": "9",
        "read_timeout": "3",
        "join_timeout": "9",
    }
    for text, what in (
        ("join_timeout", "is not a rendezvous setting"),
        ("join_timeot=1", "did you mean"),
        ("join_timeout=-1", "positive number"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_rdzv_conf(CliOverrides(rdzv_conf=text))
        assert what in str(caught.value)


def test_the_interface_is_that_of_the_route_unless_the_user_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9") is not None
    assert interface_of("192.0.2.7") is None
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert is_loopback("::1")
    assert addresses_of("127.0.0.1", where="") == ["127.0.0.1"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interface_variables("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib0"}
    assert interface_variables(None) == {"NCCL_SOCKET_IFNAME": "ib0"}
