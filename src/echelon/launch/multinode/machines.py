"""From the settings to a meeting of several machines: how many, which one this is, where they meet, and who listens there."""

from __future__ import annotations

import errno
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from importlib.metadata import version
from types import MappingProxyType

from echelon._version import __version__
from echelon.base import environ
from echelon.base.errors import ConfigError, LaunchError
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import fingerprint
from echelon.launch.interrupts import Interrupts
from echelon.launch.multinode.hub import listen
from echelon.launch.multinode.job_token import find_token
from echelon.launch.multinode.network import addresses_of, interface_of, is_loopback, own_address_towards, own_addresses
from echelon.launch.multinode.node import Node
from echelon.launch.multinode.roster import NodeInfo
from echelon.launch.schedulers.slurm import Step

__all__ = ["CliOverrides", "MultinodePlan", "check_meeting", "interface_variables", "meet", "node_range", "rdzv_conf"]

_PORT = 29500
_RDZV_PORT = 29400  # torchrun's, where --rdzv_endpoint names none
# Name -> seconds of the default; torchrun's names. Theirs are 600, 30, 5 (and 3 tries of a heartbeat).
_CONF = MappingProxyType(
    {"join_timeout": 600.0, "last_call_timeout": 30.0, "keep_alive_interval": 2.0, "keep_alive_max_attempt": 5.0}
)
_OTHER_CONF = frozenset({"timeout", "read_timeout", "close_timeout", "heartbeat_timeout", "is_host", "store_type"})
_MOST_S = 1e7
_VARIABLE = re.compile(r"\$\w|\$\{|%\w+%")


@dataclass(frozen=True, slots=True, kw_only=True)
class CliOverrides:
    """What the command line says besides the settings."""

    nnodes: str | None = None
    """As it was typed: ``4``, or ``1:4``."""
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    local_addr: str | None = None
    listen_on: str | None = None
    is_insecure: bool = False
    typed: Mapping[str, str] = field(default_factory=dict)
    """The flag of each parameter, as the user wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultinodePlan:
    """What a launcher needs to run with others."""

    info: NodeInfo
    host: str
    """An address."""
    port: int
    where: str
    token: bytes = field(repr=False)
    listener: socket.socket | None
    """The others come to this launcher; None: it goes to another."""
    interface: str | None
    """By which the ranks here reach the others."""
    join_timeout: timedelta
    last_call: timedelta
    beat: timedelta
    lost_after: timedelta

    def node(self, interrupts: Interrupts) -> Node:
        """Return this launcher's part."""
        return Node(
            self.info,
            host=self.host,
            port=self.port,
            where=self.where,
            token=self.token,
            join_timeout=self.join_timeout,
            beat=self.beat,
            lost_after=self.lost_after,
            interrupts=interrupts,
        )


def node_range(resolved: Resolved[RunConfig], asked: CliOverrides) -> tuple[int, int]:
    """Return the least and the most machines of the run.

    Raises:
        ConfigError: they are no numbers, or the least is above the most.
    """
    most = resolved.value.num_machines
    text = asked.nnodes or str(most)
    least, _, given = text.partition(":")
    if not given:
        return most, most
    flag = f"flag {asked.typed.get('num_machines', '--nnodes')}"
    if not least.isdigit() or not 1 <= int(least) <= most:
        raise ConfigError(f"{text!r} is no range of machines", where=flag, do="give MIN:MAX, such as 1:4")
    return int(least), most


def rdzv_conf(asked: CliOverrides) -> dict[str, str]:
    """Read torchrun's ``key=value,...``.

    Raises:
        ConfigError: it is something else, or a key is unknown.
    """
    found = {}
    where = f"flag {asked.typed.get('rdzv_conf', '--rdzv_conf')}"
    for part in filter(None, (asked.rdzv_conf or "").split(",")):
        name, is_one, value = part.strip().partition("=")
        if not is_one:
            raise ConfigError(f"{part!r} is no setting of a rendezvous", where=where, do="give NAME=VALUE,NAME=VALUE")
        if name not in _CONF and name not in _OTHER_CONF:
            near = get_close_matches(name, [*_CONF, *_OTHER_CONF], n=1)
            known = ", ".join([*_CONF, "is_host"])
            do = f"did you mean {near[0]}?" if near else f"known: {known}"
            raise ConfigError(f"there is no setting {name!r} of a rendezvous", where=where, do=do)
        found[name] = value.strip()
    if "timeout" in found:
        found.setdefault("join_timeout", found["timeout"])
    for name in _CONF:
        try:
            if name in found and not 0 < float(found[name]) < _MOST_S:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{name}={found[name]!r} is not a number of seconds above 0", where=where, do=f"give {name}=60"
            ) from None
    return found


def check_meeting(resolved: Resolved[RunConfig], asked: CliOverrides, step: Step | None) -> None:
    """Refuse what can be seen to be wrong without a look at the network.

    Raises:
        ConfigError: as ``meet``.
    """
    backend = resolved.value.rdzv_backend
    if backend not in (None, "c10d", "static"):
        raise ConfigError(
            f"machines do not meet by {backend!r}",
            where=str(resolved.origins["rdzv_backend"]),
            do="leave it out, or give c10d or static: the launchers meet at --rdzv_endpoint or --main_process_ip themselves",
        )
    _endpoint(resolved, asked, step)
    rdzv_conf(asked)
    node_range(resolved, asked)


def meet(resolved: Resolved[RunConfig], asked: CliOverrides, *, num_processes: int, step: Step | None) -> MultinodePlan:
    """Return how this machine takes part; when the others come to it, it listens already.

    Args:
        resolved: the settings.
        asked: the rest of the command line.
        num_processes: of this machine.
        step: of Slurm, for what the settings leave open; None: there is none.

    Raises:
        ConfigError: something is missing, or cannot be.
        LaunchError: the port is taken.
    """
    endpoint, port, where = _endpoint(resolved, asked, step)
    conf = rdzv_conf(asked)
    if step is not None and resolved.origins["num_machines"].source is SettingSource.DEFAULT:
        min_nodes = max_nodes = step.num_nodes
    else:
        min_nodes, max_nodes = node_range(resolved, asked)
    machine_rank = _machine_rank(resolved, step)
    addresses = addresses_of(endpoint, where=where)
    local = [address for address in addresses if interface_of(address) is not None]
    address = local[0] if local else addresses[0]
    _refuse_hidden_loopback(endpoint, address, where)
    is_host = _is_host(conf, machine_rank, is_local=bool(local) or asked.listen_on is not None)
    listener = _listen(asked, address, port, where, machine_rank, is_local=bool(local)) if is_host else None
    own = asked.local_addr or own_address_towards(address) or socket.gethostname()
    run_id = asked.rdzv_id or (f"slurm-{step.job_id}" if step is not None else "echelon")
    seconds = {name: float(conf.get(name, default)) for name, default in _CONF.items()}
    token = _token(asked, run_id, is_loopback=is_loopback(address) and asked.listen_on is None)
    info = NodeInfo(
        uid=secrets.token_hex(8),
        host=socket.gethostname(),
        address=own,
        machine_rank=machine_rank,
        num_processes=num_processes,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        run_id=run_id,
        versions=_versions(),
        settings={name: f"{value} (from {origin})" for name, (value, origin) in fingerprint(resolved).items()},
    )
    return MultinodePlan(
        info=info,
        # To ourselves by the address that we listen on: a wildcard is no address.
        host=address if asked.listen_on is None or listener is None else _dialled(asked.listen_on),
        port=port,
        where=where,
        token=token,
        listener=listener,
        interface=_interface(asked, own),
        join_timeout=timedelta(seconds=seconds["join_timeout"]),
        last_call=timedelta(seconds=seconds["last_call_timeout"]),
        beat=timedelta(seconds=seconds["keep_alive_interval"]),
        lost_after=timedelta(seconds=seconds["keep_alive_interval"] * seconds["keep_alive_max_attempt"]),
    )


def _refuse_hidden_loopback(endpoint: str, address: str, where: str) -> None:
    """Debian gives a machine's own name a loopback address: nobody else would come there."""
    try:
        is_said = endpoint == "localhost" or is_loopback(endpoint)
    except ValueError:
        is_said = False  # a name
    if is_loopback(address) and not is_said:
        raise ConfigError(
            f"{endpoint} is {address} here, a loopback address, at which no other machine comes in",
            where=where,
            do=f"give the address that the others reach; or correct the line of {endpoint} in /etc/hosts",
        )


def _machine_rank(resolved: Resolved[RunConfig], step: Step | None) -> int | None:
    if resolved.origins["machine_rank"].source is not SettingSource.DEFAULT:
        return resolved.value.machine_rank
    return None if step is None else step.node_rank


def _endpoint(resolved: Resolved[RunConfig], asked: CliOverrides, step: Step | None) -> tuple[str, int, str]:
    value, origins = resolved.value, resolved.origins
    if asked.rdzv_endpoint is not None:
        where = f"flag {asked.typed.get('rdzv_endpoint', '--rdzv_endpoint')}"
        host, text = _split(asked.rdzv_endpoint)
        port = value.main_process_port if text is None and value.main_process_port else _port(text, where, _RDZV_PORT)
    elif value.main_process_ip is not None:
        where = str(origins["main_process_ip"])
        host, port = value.main_process_ip, value.main_process_port or _PORT
    elif step is not None:
        where, host, port = "env SLURM_STEP_NODELIST", step.head, value.main_process_port or step.port
    else:
        raise ConfigError(
            f"{value.num_machines} machines, and nothing says where they meet",
            where=str(origins["num_machines"]),
            do="give --main_process_ip (--master_addr), the address of the machine with rank 0, or --rdzv_endpoint HOST:PORT",
        )
    if not host or _VARIABLE.search(host):
        raise ConfigError(
            f"{host!r} is no host: the variable in it was not expanded",
            where=where,
            do="double quotes let a shell expand it, single quotes and files do not; or the variable is not set where this runs",
        )
    return host, port, where


def _split(endpoint: str) -> tuple[str, str | None]:
    if endpoint.startswith("["):  # [::1]:29500
        host, _, rest = endpoint[1:].partition("]")
        return host, rest[1:] if rest.startswith(":") else None
    host, colon, port = endpoint.rpartition(":")
    return (host, port) if colon and ":" not in host else (endpoint, None)


def _port(text: str | None, where: str, default: int) -> int:
    if text is None:
        return default
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ConfigError(
            f"{text!r} is not a port", where=where, do="give HOST:PORT, port 1 to 65535, the same on all machines"
        )
    return int(text)


def _is_host(conf: Mapping[str, str], machine_rank: int | None, *, is_local: bool) -> bool:
    if "is_host" in conf:
        return conf["is_host"].lower() in ("1", "true", "t", "yes", "y")
    return is_local if machine_rank is None else machine_rank == 0


def _listen(
    asked: CliOverrides, address: str, port: int, where: str, machine_rank: int | None, *, is_local: bool
) -> socket.socket | None:
    """Listen for the others; None: another launcher of this machine does, and this one goes there."""
    if asked.listen_on is None and not is_local:
        here = ", ".join(found for found in own_addresses() if not is_loopback(found)) or "loopback only"
        raise ConfigError(
            f"{address} is no address of this machine, at which the others are to meet (it has: {here})",
            where=where,
            do="give the address of the machine with rank 0, and --machine_rank 0 there alone; behind a translated address "
            "(NAT) say where to listen: --listen_on ADDRESS",
        )
    target = asked.listen_on or address
    try:
        return listen(target, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and machine_rank is None and asked.listen_on is None:
            return None  # the second launcher on one machine
        raise LaunchError(
            f"cannot listen on {target}:{port}: {error.strerror}",
            where=where,
            do="give a free --main_process_port, the same on all machines; or end what listens there (ss -ltnp)",
        ) from error


def _dialled(listen_on: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(listen_on, listen_on)


def _token(asked: CliOverrides, run_id: str, *, is_loopback: bool) -> bytes:
    token = find_token()
    if token is not None:
        return token
    if asked.is_insecure or is_loopback:
        return f"no secret: {run_id}".encode()
    raise ConfigError(
        "several machines, and no token by which they know each other: anybody who reaches the port could join or read the run",
        where="env ECHELON_TOKEN, ECHELON_TOKEN_FILE, and the user's own file",
        do="run `echelon token` once, and copy its file to all machines (a shared home has it already), or set "
        "ECHELON_TOKEN to one long secret on all; --insecure_network goes without, where nobody else reaches the network",
    )


def _interface(asked: CliOverrides, own: str) -> str | None:
    try:
        return interface_of(own)
    except ValueError:
        if asked.local_addr is None:
            return None
    raise ConfigError(
        f"{own!r} is no address",
        where=f"flag {asked.typed.get('local_addr', '--local_addr')}",
        do="give an address of this machine, as `ip addr` shows it",
    )


def _versions() -> dict[str, str]:
    # What follows + is the device that torch was built for.
    return {"echelon": __version__, "torch": version("torch").partition("+")[0]}


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return what keeps gloo's and NCCL's own sockets on the way to the other machines, unless the user chose."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    chosen = {name: environ.get(name) for name in names}
    return {name: value for name in names if (value := chosen[name] or interface)}
