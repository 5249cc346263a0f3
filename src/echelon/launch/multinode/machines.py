"""The plan for a multi-machine run: number of machines, this machine's rank, rendezvous host and listener."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from echelon._version import __version__
from echelon.base.errors import ConfigError, LaunchError
from echelon.base.messages.translation import gettext as _, in_english
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import fingerprint
from echelon.launch.job_token import find_token, read_token
from echelon.launch.multinode.network import (
    addresses_of,
    interface_of,
    is_loopback,
    listen,
    own_address_towards,
    own_addresses,
)
from echelon.launch.multinode.roster import NodeInfo, RendezvousTimes
from echelon.launch.schedulers.slurm import Step

_PORT = 29500
_RDZV_PORT = 29400  # torchrun's default for --rdzv_endpoint
# torchrun's names -> our defaults in seconds. torchrun's defaults are 600, 30 and 5, and 3 attempts.
_CONF = MappingProxyType(
    {"join_timeout": 600.0, "last_call_timeout": 30.0, "keep_alive_interval": 2.0, "keep_alive_max_attempt": 5.0}
)
_IGNORED_CONF = frozenset({"timeout", "read_timeout", "close_timeout", "heartbeat_timeout", "is_host", "store_type"})
_TOKEN_FILE = "token_file"
_MAX_S = 1e7
_UNEXPANDED = re.compile(r"\$\w|\$\{|%\w+%")


@dataclass(frozen=True, slots=True, kw_only=True)
class CliOverrides:
    """Command line rendezvous options that are not settings."""

    nnodes: str | None = None
    """``--nnodes`` as the user typed it: ``4`` or ``1:4``."""
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    local_addr: str | None = None
    listen_on: str | None = None
    is_insecure: bool = False
    typed: Mapping[str, str] = field(default_factory=dict)
    """Maps each parameter name to the flag as the user typed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultinodePlan:
    """A launcher's settings for a multi-machine run."""

    info: NodeInfo
    host: str
    """The rendezvous host's address."""
    port: int
    where: str
    token: bytes = field(repr=False)
    listener: socket.socket | None
    """Listening socket on the rendezvous host; None on the other machines."""
    interface: str | None
    """Network interface through which this machine's ranks reach the other ranks."""
    times: RendezvousTimes


def node_range(resolved: Resolved[RunConfig], overrides: CliOverrides) -> tuple[int, int]:
    """Return the minimum and maximum number of machines.

    Raises:
        ConfigError: the text is not a range, or its minimum is above its maximum.
    """
    max_nodes = resolved.value.num_machines
    text = overrides.nnodes or str(max_nodes)
    min_nodes, _colon, has_range = text.partition(":")
    if not has_range:
        return max_nodes, max_nodes
    flag = _("flag {name}", name=overrides.typed.get("num_machines", "--nnodes"))
    if not min_nodes.isdigit() or not 1 <= int(min_nodes) <= max_nodes:
        raise ConfigError(
            _("{text!r} is neither a number nor a range of machines", text=text),
            where=flag,
            do=_("use MIN:MAX, such as 1:4"),
        )
    return int(min_nodes), max_nodes


def parse_rdzv_conf(overrides: CliOverrides) -> dict[str, str]:
    """Parse torchrun's ``--rdzv_conf key=value,...``.

    Raises:
        ConfigError: the syntax is invalid, or a key is unknown.
    """
    found = {}
    where = _("flag {name}", name=overrides.typed.get("rdzv_conf", "--rdzv_conf"))
    for part in filter(None, (overrides.rdzv_conf or "").split(",")):
        name, has_value, value = part.strip().partition("=")
        if not has_value:
            raise ConfigError(
                _("{part!r} is not a rendezvous setting", part=part), where=where, do=_("use NAME=VALUE,NAME=VALUE")
            )
        if name not in _CONF and name not in _IGNORED_CONF and name != _TOKEN_FILE:
            near = get_close_matches(name, [*_CONF, _TOKEN_FILE, *_IGNORED_CONF], n=1)
            known = ", ".join([*_CONF, _TOKEN_FILE, "is_host"])
            do = _("did you mean {near}?", near=near[0]) if near else _("known settings: {known}", known=known)
            raise ConfigError(_("unknown rendezvous setting {name!r}", name=name), where=where, do=do)
        found[name] = value.strip()
    if "timeout" in found:
        found.setdefault("join_timeout", found["timeout"])
    for name in _CONF:
        try:
            if name in found and not 0 < float(found[name]) < _MAX_S:
                raise ValueError
        except ValueError:
            raise ConfigError(
                _("{name}={value!r} is not a positive number of seconds", name=name, value=found[name]),
                where=where,
                do=_("use {name}=60", name=name),
            ) from None
    return found


def check_rendezvous(resolved: Resolved[RunConfig], overrides: CliOverrides, step: Step | None) -> None:
    """Raise an error for invalid rendezvous settings, without using the network.

    Raises:
        ConfigError: as ``make_plan``.
    """
    backend = resolved.value.rdzv_backend
    if backend not in (None, "c10d", "static", "echelon"):
        raise ConfigError(
            _("rendezvous backend {backend!r} is not supported", backend=backend),
            where=str(resolved.origins["rdzv_backend"]),
            do=_(
                "remove rdzv_backend, or set it to c10d or static; the launchers themselves connect to "
                "--rdzv_endpoint or --main_process_ip"
            ),
        )
    _endpoint(resolved, overrides, step)
    parse_rdzv_conf(overrides)
    node_range(resolved, overrides)


def make_plan(
    resolved: Resolved[RunConfig], overrides: CliOverrides, *, num_processes: int, step: Step | None
) -> MultinodePlan:
    """Return this machine's plan. On the rendezvous host, also open the listener.

    Args:
        resolved: settings.
        overrides: the command line's rendezvous options.
        num_processes: number of processes on this machine.
        step: the Slurm step that provides missing settings, or None.

    Raises:
        ConfigError: a setting is missing or invalid.
        LaunchError: the port is in use.
    """
    endpoint, port, where = _endpoint(resolved, overrides, step)
    conf = parse_rdzv_conf(overrides)
    if step is not None and resolved.origins["num_machines"].source is SettingSource.DEFAULT:
        min_nodes = max_nodes = step.num_nodes
    else:
        min_nodes, max_nodes = node_range(resolved, overrides)
    machine_rank = _machine_rank(resolved, step)
    addresses = addresses_of(endpoint, where=where)
    local = [address for address in addresses if interface_of(address) is not None]
    address = local[0] if local else addresses[0]
    _refuse_loopback_name(endpoint, address, where)
    is_host = _is_host(conf, machine_rank, is_local=bool(local) or overrides.listen_on is not None)
    listener = _listen(overrides, address, port, where, machine_rank, is_local=bool(local)) if is_host else None
    own = overrides.local_addr or own_address_towards(address) or socket.gethostname()
    run_id = overrides.rdzv_id or (f"slurm-{step.job_id}" if step is not None else "echelon")
    seconds = {name: float(conf.get(name, default)) for name, default in _CONF.items()}
    token = _token(
        overrides, run_id, conf.get(_TOKEN_FILE), is_loopback=is_loopback(address) and overrides.listen_on is None
    )
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
        settings={
            name: f"{value} (from {in_english(origin)})" for name, (value, origin) in fingerprint(resolved).items()
        },
    )
    return MultinodePlan(
        info=info,
        host=address,
        port=port,
        where=where,
        token=token,
        listener=listener,
        interface=_interface(overrides, own),
        times=RendezvousTimes(
            join_timeout=timedelta(seconds=seconds["join_timeout"]),
            last_call=timedelta(seconds=seconds["last_call_timeout"]),
            heartbeat=timedelta(seconds=seconds["keep_alive_interval"]),
            lost_after=timedelta(seconds=seconds["keep_alive_interval"] * seconds["keep_alive_max_attempt"]),
        ),
    )


def _refuse_loopback_name(endpoint: str, address: str, where: str) -> None:
    """Raise an error for a host name that resolves to loopback, as a machine's own name does on Debian."""
    try:
        is_explicit = endpoint == "localhost" or is_loopback(endpoint)
    except ValueError:
        is_explicit = False  # a host name
    if is_loopback(address) and not is_explicit:
        raise ConfigError(
            _(
                "{endpoint} resolves to the loopback address {address}, which no other machine can reach",
                endpoint=endpoint,
                address=address,
            ),
            where=where,
            do=_(
                "use an address that the other machines can reach, or correct the entry for {endpoint} in /etc/hosts",
                endpoint=endpoint,
            ),
        )


def _machine_rank(resolved: Resolved[RunConfig], step: Step | None) -> int | None:
    if resolved.origins["machine_rank"].source is not SettingSource.DEFAULT:
        return resolved.value.machine_rank
    return None if step is None else step.node_rank


def _endpoint(resolved: Resolved[RunConfig], overrides: CliOverrides, step: Step | None) -> tuple[str, int, str]:
    value, origins = resolved.value, resolved.origins
    if overrides.rdzv_endpoint is not None:
        where = _("flag {name}", name=overrides.typed.get("rdzv_endpoint", "--rdzv_endpoint"))
        host, text = _split(overrides.rdzv_endpoint)
        port = value.main_process_port if text is None and value.main_process_port else _port(text, where, _RDZV_PORT)
    elif value.main_process_ip is not None:
        where = str(origins["main_process_ip"])
        host, port = value.main_process_ip, value.main_process_port or _PORT
    elif step is not None:
        where, host, port = "env SLURM_STEP_NODELIST", step.head, value.main_process_port or step.port
    else:
        raise ConfigError(
            _("{num_machines} machines need a rendezvous address, but none is set", num_machines=value.num_machines),
            where=str(origins["num_machines"]),
            do=_(
                "set --main_process_ip (--master_addr) to the address of the machine with rank 0, or use "
                "--rdzv_endpoint HOST:PORT"
            ),
        )
    if not host or _UNEXPANDED.search(host):
        raise ConfigError(
            _("{host!r} is not a host name: the variable in it was not expanded", host=host),
            where=where,
            do=_(
                "set the variable, and use double quotes on the command line; variables in single quotes or in files "
                "are not expanded"
            ),
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
            _("{text!r} is not a port", text=text),
            where=where,
            do=_("use HOST:PORT with a port from 1 to 65535, the same on all machines"),
        )
    return int(text)


def _is_host(conf: Mapping[str, str], machine_rank: int | None, *, is_local: bool) -> bool:
    if "is_host" in conf:
        return conf["is_host"].lower() in ("1", "true", "t", "yes", "y")
    return is_local if machine_rank is None else machine_rank == 0


def _listen(
    overrides: CliOverrides, address: str, port: int, where: str, machine_rank: int | None, *, is_local: bool
) -> socket.socket | None:
    """Open the listener; return None if another launcher on this machine is already listening."""
    if overrides.listen_on is None and not is_local:
        here = ", ".join(found for found in own_addresses() if not is_loopback(found)) or _("loopback only")
        raise ConfigError(
            _(
                "this machine is the rendezvous host, but {address} is not one of its addresses ({here})",
                address=address,
                here=here,
            ),
            where=where,
            do=_(
                "use the address of the machine with rank 0, and set --machine_rank 0 only there; behind NAT, also "
                "set --listen_on to the address to listen on"
            ),
        )
    target = overrides.listen_on or address
    try:
        return listen(target, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and machine_rank is None and overrides.listen_on is None:
            return None  # the second launcher on one machine
        is_of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise LaunchError(
            _("cannot listen on {target}:{port}: {error}", target=target, port=port, error=_reason(error)),
            where=where if is_of_port or overrides.listen_on is None else _("flag {name}", name="--listen_on"),
            do=_(
                "use a free --main_process_port, the same on all machines; `ss -ltnp` shows which process is using "
                "this port"
            )
            if is_of_port
            else _("use one of this machine's addresses, as shown by `ip addr`"),
        ) from error


def _reason(error: OSError) -> str:
    """Return why an address cannot be used, without the address; names that do not resolve have negative numbers."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error.strerror or error).partition(" (while attempting")[0]


def _token(overrides: CliOverrides, run_id: str, file: str | None, *, is_loopback: bool) -> bytes:
    where = f"flag {overrides.typed.get('rdzv_conf', '--rdzv_conf')}"
    token = find_token() if file is None else read_token(Path(file), where)
    if token is not None:
        return token
    if overrides.is_insecure or is_loopback:
        return _("no secret: {run_id}", run_id=run_id).encode()
    raise ConfigError(
        _(
            "a run on several machines needs a token; without one, anyone who can reach the port could join or "
            "read the run"
        ),
        where=_("env ECHELON_TOKEN, env ECHELON_TOKEN_FILE, and the file that `echelon token` writes"),
        do=_(
            "run `echelon token` once and copy its file to all machines (unless they share a home directory), or "
            "set ECHELON_TOKEN to the same long secret on all machines; on an isolated network, add "
            "--insecure_network to run without a token"
        ),
    )


def _interface(overrides: CliOverrides, own: str) -> str | None:
    try:
        return interface_of(own)
    except ValueError:
        if overrides.local_addr is None:
            return None
    raise ConfigError(
        _("{own!r} is not an IP address", own=own),
        where=_("flag {name}", name=overrides.typed.get("local_addr", "--local_addr")),
        do=_("use one of this machine's addresses, as shown by `ip addr`"),
    )


def _versions() -> dict[str, str]:
    # The part after + is the device that torch was built for.
    return {"echelon": __version__, "torch": version("torch").partition("+")[0]}
