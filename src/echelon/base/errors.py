"""Errors that state what happened, where, and what to do; pickling between ranks preserves all three.

docs/errors.md contains their docstrings.
"""

from __future__ import annotations

from echelon.base.printable import printable
from echelon.base.rank import known_rank

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DesyncError",
    "EchelonError",
    "LaunchError",
    "MissingExtraError",
    "RankTimeoutError",
    "SetupError",
    "UsageError",
]


class EchelonError(Exception):
    """Base class of all errors that echelon raises for its users.

    Args:
        what: what happened, with the values.
        where: the setting or location; the rank is prepended if it is known.
        do: how to solve it.
    """

    exit_code = 1
    """The exit code of a process that ends with this error."""

    def __init__(self, what: str, *, where: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        rank = known_rank()
        places = ([f"rank {rank}"] if rank is not None else []) + ([where] if where else [])
        self.what = what
        self.where: str | None = ", ".join(places) or None
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.do:
            lines.append(f"  do:    {self.do}")
        return printable("\n".join(lines))  # the text may come from a user, a file or another rank

    def __reduce__(self) -> tuple[object, ...]:
        # Exception.__reduce__ drops keyword-only arguments, and the rank must remain that of the raising process.
        return (_rebuild, (type(self), self.what, self.where, self.do))


def _rebuild(kind: type[EchelonError], what: str, where: str | None, do: str | None) -> EchelonError:
    error = kind(what, do=do)
    error.where = where
    return error


class ConfigError(EchelonError, ValueError):
    """A setting is invalid, unknown, or in conflict with another one.

    Causes: a mistyped name or value, in a file, a flag, a variable or an argument; two settings that cannot both hold
        (a train_batch_size that is not micro batch x accumulation x processes); a setting that this device, engine or
        version does not support.
    Do: correct the setting at the origin that the message names; ``echelon config explain`` shows every value with its origin
        and the values that it overrides.
    """


class UsageError(EchelonError, ValueError):
    """A function of echelon was called in a way that cannot work.

    Causes: an argument of the wrong type or value; calls in the wrong order (``backward`` before ``prepare``); something
        that the chosen engine or parity does not support; a name of Accelerate or transformers that is not supported.
    Do: change the call at the end of the traceback, as the message says.
    """


class SetupError(EchelonError, RuntimeError):
    """The process group cannot be initialized.

    Causes: MASTER_ADDR or MASTER_PORT is missing, or names a port that another program uses; rank 0 is unreachable or
        has not started; a second ``setup()`` with other values; no shared memory left for ``share_dataset``.
    Do: start the script with ``echelon launch`` or ``torchrun``, which set these variables and find a free port; for several
        launches on one machine, do not set a port.
    """


class CheckpointError(EchelonError, RuntimeError):
    """A checkpoint cannot be written or loaded.

    Causes: a file is damaged, missing, or contains data that could run code; the checkpoint belongs to another model,
        optimizer or number of loaders; another run saves into the same folder.
    Do: ``echelon checkpoint verify FOLDER`` names the damaged file, ``echelon checkpoint show FOLDER`` lists the contents.
        Resume from an older checkpoint (``echelon checkpoint ls FOLDER``), or prepare the objects that were saved.
    """


class DesyncError(EchelonError, RuntimeError):
    """The ranks disagree in shapes, structures or decisions.

    Causes: tensors of unequal size in ``gather`` or ``reduce``; a model or a dataset length that differs between ranks,
        often because each rank drew its own random numbers; a loop that ends earlier on one rank; a collective call under ``if
        rank == 0``.
    Do: the message lists the values of each rank. Make them equal (``set_seed`` before the model is built,
        ``pad_across_processes`` or ``gather_for_metrics`` for unequal sizes), and make the same calls on every rank.
    """


class RankTimeoutError(EchelonError, TimeoutError):
    """Some ranks, named in the message, did not arrive in time.

    Causes: a rank skipped the call (``if rank == 0``, an early ``break``), is still reading or downloading data, hangs, or has
        exited.
    Do: check what the named ranks are doing; download before the process group is initialized, or under ``main_first()``; if
        the wait is intended, raise the timeout (``process_group(timeout=)``, ``InitProcessGroupKwargs(timeout=)``).
    """


class LaunchError(EchelonError, RuntimeError):
    """The processes could not be started, or one of them failed.

    Causes: the script raised an exception or was killed on a rank, which is named with its line; a missing program, a used
        port or a system limit prevents a process from starting; a notebook used the accelerator before
        ``notebook_launcher``.
    Do: fix the error of the first failing rank, which the message names: the errors of other ranks follow from it.
        ``--log_dir`` keeps the whole output.
    """


class MissingExtraError(EchelonError, ImportError):
    """A required optional dependency is not installed.

    Causes: a requested engine, tracker, optimizer or precision needs a package that is missing.
    Do: run the ``pip install`` command from the message in the environment of the script.
    """
