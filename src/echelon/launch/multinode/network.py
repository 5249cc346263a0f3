"""Addresses: what a name means, which of them are this machine's, and by which interface it reaches another."""

from __future__ import annotations

import ipaddress
import socket

from echelon.base.errors import ConfigError

__all__ = ["addresses_of", "interface_of", "is_loopback", "own_address_towards", "own_addresses"]


def addresses_of(host: str, *, where: str) -> list[str]:
    """Return the addresses of a host by its name, IPv4 first.

    Raises:
        ConfigError: nobody knows it.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the host {host!r} is not known here: {error}",
            where=where,
            do="give a name that every machine knows, or the address (see `ip addr` on that machine)",
        ) from error
    return sorted({str(entry[4][0]) for entry in found}, key=lambda text: (":" in text, text))


def own_addresses() -> dict[str, str]:
    """Return the interface of each address of this machine."""
    import psutil  # noqa: PLC0415 - ten milliseconds that runs on one machine do not need

    found = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found[entry.address.partition("%")[0]] = interface
    return found


def is_loopback(address: str) -> bool:
    """Tell whether ``address`` means the machine that says it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address_towards(address: str) -> str | None:
    """Return our address on the way to ``address``; None: there is no way. Nothing is sent."""
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
