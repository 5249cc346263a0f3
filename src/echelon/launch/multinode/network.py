"""Network addresses: host names, this machine's own addresses and interfaces, and listening sockets."""

from __future__ import annotations

import ipaddress
import socket

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _

_BACKLOG = 1024


def addresses_of(host: str, *, where: str) -> list[str]:
    """Return the addresses of ``host``, IPv4 first.

    Raises:
        ConfigError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            _("cannot resolve the host name {host!r}: {error}", host=host, error=error),
            where=where,
            do=_("use a name that every machine can resolve, or that machine's address (shown by `ip addr`)"),
        ) from error
    return sorted({str(entry[4][0]) for entry in found}, key=lambda text: (":" in text, text))


def own_addresses() -> dict[str, str]:
    """Return a dict from each of this machine's addresses to its interface."""
    import psutil  # noqa: PLC0415 - takes 10 ms, and only runs on several machines need it

    found = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found[entry.address.partition("%")[0]] = interface
    return found


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address_towards(address: str) -> str | None:
    """Return this machine's address on the route to ``address``, or None if there is no route. Sends no packets."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, 9))
            return str(sock.getsockname()[0])
        except OSError:
            return None


def interface_of(address: str) -> str | None:
    """Return the interface with ``address``, or None if this machine does not have that address."""
    own = own_addresses()
    if address not in own and is_loopback(address):
        return own.get("127.0.0.1")  # all addresses in 127.0.0.0/8 belong to it
    return own.get(address)


def listen(address: str, port: int) -> socket.socket:
    """Listen on one of this machine's addresses.

    Raises:
        OSError: the port is in use, or this machine does not have ``address``.
    """
    is_ipv6 = ":" in address
    return socket.create_server(
        (address, port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=_BACKLOG,
        dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
    )
