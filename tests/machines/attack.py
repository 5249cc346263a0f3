"""Somebody on the network who does not know the token: garbage, half-open connections, handshakes that were heard, torch's own client.

Run in a namespace: ``attack.py ADDRESS COUNT SEED FILE``; until FILE is there. It prints what it has found, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_OPEN_S = 0.2


def open_ports(address: str) -> list[int]:
    """Every port that lets us connect."""

    def try_port(port: int) -> int | None:
        with socket.socket() as sock:
            sock.settimeout(_OPEN_S)
            return port if sock.connect_ex((address, port)) == 0 else None

    with ThreadPoolExecutor(64) as pool:
        return [port for port in pool.map(try_port, range(1, 65536)) if port is not None]


def read(address: str, port: int, data: bytes) -> bytes:
    """What comes back for ``data``."""
    found = b""
    with socket.socket() as sock, suppress(OSError):
        sock.settimeout(_OPEN_S)
        sock.connect((address, port))
        sock.sendall(data)
        while chunk := sock.recv(4096):
            found += chunk
    return found


def ask_store(address: str, port: int) -> str:
    """What torch's own client of a store gets to do there."""
    from datetime import timedelta

    import torch.distributed as dist

    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        store.set("seen", "by a stranger")
        return f"it took a key, and gave {store.get('seen')!r}"
    except Exception as error:  # noqa: BLE001 - whatever it says, it did not work
        return f"refused: {type(error).__name__}"


def main() -> None:
    address, count, draw, until = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3])), sys.argv[4]
    ports = open_ports(address)
    claim = b"ECHELON2" + draw.randbytes(32) + b"N\0\0\0\0" + draw.randbytes(32)  # as one that was heard
    held: deque[socket.socket] = deque(maxlen=400)  # the oldest goes when there are more
    answers: dict[int, set[int]] = {port: set() for port in ports}
    jobs = [(ports[i % len(ports)], i % 4, draw.randbytes(draw.randrange(1, 300))) for i in range(count)]

    def attack(job: tuple[int, int, bytes]) -> None:
        port, kind, garbage = job
        if kind < 2:
            answers[port].add(len(read(address, port, garbage if kind == 0 else claim)))
            return
        sock = socket.socket()
        sock.settimeout(_OPEN_S)
        with suppress(OSError):
            sock.connect((address, port))
        if kind == 2:
            sock.close()
        else:
            held.append(sock)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(attack, jobs))
    stores = {port: ask_store(address, port) for port in ports[:1]}
    json.dump(
        {
            "ports": ports,
            "answers": {p: sorted(a) for p, a in answers.items()},
            "stores": stores,
            "made": len(jobs),
            "held": len(held),
        },
        sys.stdout,
    )
    print(flush=True)
    while not os.path.exists(until):
        time.sleep(0.02)


if __name__ == "__main__":
    main()
