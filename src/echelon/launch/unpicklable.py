"""Finds the dataset attribute that cannot be pickled for DataLoader workers, because pickle reports only its type."""

from __future__ import annotations

import os
import pickle
import sys
from types import FunctionType
from typing import Any

_DATALOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_SENT = ("dataset", "collate_fn", "worker_init_fn", "generator")  # attributes that torch sends to each worker
_MAX_DEPTH = 6


def unpicklable_part(error: BaseException) -> str:
    """Return a DataLoader's unpicklable part, such as ``dataset.lock, of class Images``; empty for other errors."""
    if "pickle" not in str(error):
        return ""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        loader = frame.f_locals.get("self")
        if frame.f_code.co_filename.endswith(_DATALOADER) and hasattr(loader, "dataset"):
            return next((found for name in _SENT if (found := _find(getattr(loader, name, None), name, "", 0))), "")
        traceback = traceback.tb_next
    return ""


def _find(value: Any, path: str, owner: str, depth: int) -> str:
    """Return the innermost attribute or item in ``value`` that cannot be pickled."""
    if _is_picklable(value):
        return ""
    inside: dict[str, Any] = {}
    if isinstance(value, dict):
        inside = {f"{path}[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        inside = {f"{path}[{number}]": item for number, item in enumerate(value)}
    elif hasattr(value, "__dict__") and not hasattr(value, "__code__") and not isinstance(value, type):
        inside = {f"{path}.{name}": item for name, item in vars(value).items()}
    if depth < _MAX_DEPTH:
        for name, item in inside.items():
            found = _find(item, name, type(value).__name__, depth + 1)
            if found:
                return found
    kind = value.__qualname__ if isinstance(value, FunctionType) else f"a {type(value).__name__}"
    return f"{path}{f', of class {owner}' if owner else ''} ({kind})"


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Probe(pickle.Pickler):
    """A pickler for a dry run. Tensors count as picklable, because torch shares them itself."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, (torch.Tensor, torch.Generator)):
            return int, ()
        return NotImplemented


def _is_picklable(value: Any) -> bool:
    try:
        _Probe(_Nowhere()).dump(value)
    except Exception:  # noqa: BLE001 - a user's __reduce__ may raise any exception
        return False
    return True
