"""What the base scripts show after each update, to prove the effect of a fault without the recorder.

Outside ``watching`` a call costs one comparison and shows nothing, as in a recorded run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_watchers: list[Callable[[dict[str, torch.Tensor]], None]] = []


def probe(read: Callable[[], dict[str, Any]]) -> None:
    """Show the values of ``read()`` (tensors, or numbers) after an update. Collective if reading them is."""
    for watcher in _watchers:
        watcher({name: torch.as_tensor(value).detach().clone() for name, value in read().items()})


@contextmanager
def watching() -> Iterator[list[dict[str, torch.Tensor]]]:
    """Collect the values of each update in a list."""
    found: list[dict[str, torch.Tensor]] = []
    _watchers.append(found.append)
    try:
        yield found
    finally:
        _watchers.remove(found.append)
