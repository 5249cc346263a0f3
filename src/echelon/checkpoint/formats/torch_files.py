"""Files of ``torch.save``: read without running code, and written so that they can be read again."""

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

__all__ = ["PLAIN_DATA", "load", "read_all_ranks", "refused_in", "write_pickled", "write_plain"]

# Where numpy keeps these functions depends on its version, and a file has the names of the one that wrote it.
_NUMPY_FUNCTIONS: tuple[Any, ...] = (np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0])
# What files of training states hold beside tensors: numpy arrays, scalars and their dtypes; plain data, no code.
_ALLOWED: tuple[Any, ...] = (
    *_NUMPY_FUNCTIONS,
    *((f, f"numpy.{core}.multiarray.{f.__name__}") for f in _NUMPY_FUNCTIONS for core in ("core", "_core")),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]},
    codecs.encode,  # how pickle writes bytes
)
PLAIN_DATA = "save tensors, numbers, text, lists, tuples, dicts and numpy arrays"


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what ``torch.save`` wrote: tensors, containers and numpy arrays; a file that holds code is refused.

    Args:
        f: a path or an open file.
        map_location: of ``torch.load``.
        kwargs: of ``torch.load``.

    Raises:
        UsageError: ``weights_only=False`` is asked for.
        CheckpointError: the file holds something else, or is damaged.
    """
    if not kwargs.pop("weights_only", True):
        raise UsageError(
            "load(weights_only=False) would run whatever code the file holds",
            do="leave weights_only out; for a file of your own, call torch.load yourself",
        )
    name = os.fspath(f) if isinstance(f, (str, os.PathLike)) else "the file"
    try:
        with torch.serialization.safe_globals(list(_ALLOWED)):
            return torch.load(f, map_location=map_location, weights_only=True, **kwargs)
    except pickle.UnpicklingError as error:
        # Torch's own message advises to load with weights_only=False, which runs the code.
        found = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"(Unsupported .*)", str(error))
        raise CheckpointError(
            f"{name} holds {found[1] if found else 'something'}, which is not plain data, and is not loaded: it could run code",
            do=f"{PLAIN_DATA}; to run the code of a file of your own, call torch.load yourself",
        ) from error
    except FileNotFoundError:
        raise
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        raise damaged(f"{name} cannot be read: {error}") from error


def read_all_ranks(folder: Path, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return what the files of the ranks hold, in the order of the ranks; group 1 of ``pattern`` is the rank, or empty.

    Raises:
        CheckpointError: that of a rank is missing, damaged, or holds code.
    """
    found = {int(match[1] or 0): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"{folder} has random states of the ranks {sorted(found)}",
            do="import a whole checkpoint, with those of all ranks",
        )
    return [load(found[rank], map_location="cpu") for rank in range(len(found))]


def refused_in(f: str | os.PathLike[str] | Any) -> list[str]:
    """Return the names in a file that ``torch.save`` wrote for which ``load`` would refuse it."""
    with torch.serialization.safe_globals(list(_ALLOWED)):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(f))


def write_pickled(obj: Any, path: Path) -> None:
    """Write ``obj`` by ``torch.save``; what the file system refuses is the OSError that it gives, which torch's own writer hides."""
    with path.open("wb") as file:
        torch.save(obj, file)


def write_plain(obj: Any, path: Path) -> None:
    """Write ``obj`` by ``torch.save``, and require that ``load`` accepts the file.

    Raises:
        CheckpointError: ``obj`` holds something other than plain data; it is named.
    """
    write_pickled(obj, path)
    refused = refused_in(path)
    if refused:
        raise CheckpointError(
            f"the state for {path.name} holds {', '.join(refused)}, which is not plain data: it could not be loaded again "
            "without running code",
            do=f"in state_dict(), {PLAIN_DATA}",
        )
