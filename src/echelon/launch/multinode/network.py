"""Network addresses: host names, this machine's own addresses and interfaces, and listening sockets."""

from __future__ import annotations

import ipaddress
import socket

from echelon.base.errors import ConfigError

__all__ = ["addresses_of", "interface_of", "is_loopback", "listen", "own_address_towards", "own_addresses"]

_BACKLOG = 1024


def addresses_of(host: str, *, where: str) -> list[str]:
    """Return the addresses of a host by its name, IPv4 first.

    Raises:
        ConfigError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot resolve the host name {host!r}: {error}",
            where=where,
            do="give a name that every machine can resolve, or the address (`ip addr` on that machine shows it)",
        ) from error
    return sorted({str(entry[4][0]) for entry in found}, key=lambda text: (":" in text, text))


def own_addresses() -> dict[str, str]:
    """Return the interface of each address of this machine."""
    import psutil  # noqa: PLC0415 - takes ten milliseconds, and only runs on several machines need it

    found = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found[entry.address.partition("%")[0]] = interface
    return found


def is_loopback(address: str) -> bool:
    """Tell whether ``address`` is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address_towards(address: str) -> str | None:
    """Return our address on the route to ``address``; None: there is no route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, 9))
            return str(sock.getsockname()[0])
        except OSError:
            return None


def interface_of(address: str) -> str | None:
    """Return the interface that has ``address``; None: it is not this machine's."""
    own = own_addresses()
    if address not in own and is_loopback(address):
        return own.get("127.0.0.1")  # all of 127.0.0.0/8 is
    return own.get(address)


def listen(address: str, port: int) -> socket.socket:
    """Listen on one address of this machine.

    Raises:
        OSError: the port is in use, or ``address`` is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
