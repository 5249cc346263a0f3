"""Reads ``torch.save`` files without running code, and writes files that can be read this way."""

from __future__ import annotations

import codecs
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint.damage import damaged

# The module of these functions depends on the numpy version, and a file contains the names of the version that wrote it.
_NUMPY_FUNCTIONS: tuple[Any, ...] = (np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0])
# Allowed globals beside tensors: numpy arrays, scalars and their dtypes. They are plain data, not code.
_ALLOWED: tuple[Any, ...] = (
    *_NUMPY_FUNCTIONS,
    *((f, f"numpy.{core}.multiarray.{f.__name__}") for f in _NUMPY_FUNCTIONS for core in ("core", "_core")),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]},
    codecs.encode,  # used by pickle for bytes
)
PLAIN_DATA = "save only tensors, numbers, strings, lists, tuples, dicts and numpy arrays"


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read a ``torch.save`` file that contains tensors, containers and numpy arrays. Files that contain code are rejected.

    Args:
        f: path or open file.
        map_location: passed to ``torch.load``.
        kwargs: passed to ``torch.load``.

    Raises:
        UsageError: ``weights_only=False`` is passed.
        CheckpointError: the file is damaged or contains anything other than plain data.
    """
    if not kwargs.pop("weights_only", True):
        raise UsageError(
            "load(weights_only=False) would run any code stored in the file",
            do="remove weights_only; if you trust the file, call torch.load yourself",
        )
    name = os.fspath(f) if isinstance(f, (str, os.PathLike)) else "the file"
    try:
        with torch.serialization.safe_globals(list(_ALLOWED)):
            return torch.load(f, map_location=map_location, weights_only=True, **kwargs)
    except pickle.UnpicklingError as error:
        # torch's message recommends weights_only=False, which would run the code.
        found = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"(Unsupported .*)", str(error))
        raise CheckpointError(
            f"{name} was not loaded, because it could run code: it contains {found[1] if found else 'an object'}, "
            "which is not "
            "plain data",
            do=f"{PLAIN_DATA}; if you trust the file, call torch.load yourself",
        ) from error
    except FileNotFoundError:
        raise
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        raise damaged(f"{name} cannot be read: {error}") from error


def read_all_ranks(folder: Path, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    """Load the files of all ranks, in rank order. Group 1 of ``pattern`` matches the rank or nothing.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or contains code.
    """
    found = {int(match[1] or 0): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"{folder} contains RNG states only for ranks {sorted(found)}",
            do="import a complete checkpoint, which contains the RNG states of all ranks",
        )
    return [load(found[rank], map_location="cpu") for rank in range(len(found))]


def refused_in(f: str | os.PathLike[str] | Any) -> list[str]:
    """Return the names in a ``torch.save`` file that cause ``load`` to reject it."""
    with torch.serialization.safe_globals(list(_ALLOWED)):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(f))


def write_pickled(obj: Any, path: Path) -> None:
    """Write ``obj`` with ``torch.save``. File system errors are raised as ``OSError``, which torch's own writer would hide."""
    with path.open("wb") as file:
        torch.save(obj, file)


def write_plain(obj: Any, path: Path) -> None:
    """Write ``obj`` with ``torch.save``, and check that ``load`` accepts the file.

    Raises:
        CheckpointError: ``obj`` contains anything other than plain data; the error names it.
    """
    write_pickled(obj, path)
    refused = refused_in(path)
    if refused:
        raise CheckpointError(
            f"the state for {path.name} contains {', '.join(refused)}, which is not plain data and could not be loaded without "
            "running code",
            do=f"in state_dict(), {PLAIN_DATA}",
        )
