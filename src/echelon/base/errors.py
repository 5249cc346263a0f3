"""Errors that say what happened, where, and what to do; they keep all three when pickled between ranks.

The docstring of each, with its causes and what to do, is its text in docs/errors.md.
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
    """Base of every error that a user of echelon can meet.

    Args:
        what: what happened, with the values.
        where: the setting or place; the rank is put before it when it is known.
        do: what to do about it.
    """

    exit_code = 1
    """Of a process that ends because of it."""

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
        return printable("\n".join(lines))  # what a user, a file or another rank wrote may stand in it

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive Exception's own __reduce__, and the rank must stay the raising one's.
        return (_rebuild, (type(self), self.what, self.where, self.do))


def _rebuild(kind: type[EchelonError], what: str, where: str | None, do: str | None) -> EchelonError:
    error = kind(what, do=do)
    error.where = where
    return error


class ConfigError(EchelonError, ValueError):
    """A setting is wrong, unknown, or in conflict with another one.

    Causes: a mistyped name or value, in a file, a flag, a variable or an argument; two settings that cannot both hold
        (a train_batch_size that is not micro batch x accumulation x processes); a setting that this device, engine or
        version cannot give.
    Do: correct the setting where the message says that it came from; ``echelon config explain`` shows every value, its
        origin, and what it overrode.
    """


class UsageError(EchelonError, ValueError):
    """A function of echelon was called in a way that cannot work.

    Causes: an argument of the wrong type or value; calls in the wrong order (``backward`` before ``prepare``); something
        that the chosen engine or parity cannot do; a name of Accelerate or transformers that is not offered yet.
    Do: change the call that the traceback ends in, as the message says.
    """


class SetupError(EchelonError, RuntimeError):
    """The process group cannot be made as asked.

    Causes: MASTER_ADDR or MASTER_PORT is missing, or names a port that another program uses; rank 0 cannot be reached, or
        has not started; ``setup()`` a second time with other values; no shared memory left for ``share_dataset``.
    Do: start the script by ``echelon launch`` or ``torchrun``, which set these variables and find a free port; for several
        launches on one machine, leave the port out.
    """


class CheckpointError(EchelonError, RuntimeError):
    """A checkpoint cannot be written, or is not what it must be to be loaded.

    Causes: a file of it is damaged, missing, or holds what could run code; it is the checkpoint of another model,
        optimizer or number of loaders; another run saves into the same folder.
    Do: ``echelon checkpoint verify FOLDER`` names the damaged file, ``echelon checkpoint show FOLDER`` says what it holds.
        Go on from an older checkpoint (``echelon checkpoint ls FOLDER``), or prepare the objects that were saved.
    """


class DesyncError(EchelonError, RuntimeError):
    """The ranks disagree: other shapes, other structures, other decisions.

    Causes: tensors of unequal size in ``gather`` or ``reduce``; a model or a length of data that differs between ranks,
        often because each drew its own random numbers; a loop that ends earlier on one rank; a collective call under ``if
        rank == 0``.
    Do: the message lists what each rank brings. Make it equal (``set_seed`` before the model is built,
        ``pad_across_processes`` or ``gather_for_metrics`` for unequal sizes), and let every rank make the same calls.
    """


class RankTimeoutError(EchelonError, TimeoutError):
    """Some ranks did not arrive in time; they are named.

    Causes: a rank skipped the call (``if rank == 0``, an early ``break``), still reads or downloads data, hangs, or has
        ended.
    Do: look at what the named ranks do; download before the group is made, or under ``main_first()``; where the wait is
        meant, raise the timeout (``process_group(timeout=)``, ``InitProcessGroupKwargs(timeout=)``).
    """


class LaunchError(EchelonError, RuntimeError):
    """The processes cannot be started, or one of them failed.

    Causes: the script raised an exception or was killed on some rank, which is named with its line; the program, the port
        or the limits of the system do not let a process start; a notebook used the accelerator before
        ``notebook_launcher``.
    Do: correct the first failing rank, which the message names: what the others say follows from it. Its whole output is
        kept by ``--log_dir``.
    """


class MissingExtraError(EchelonError, ImportError):
    """An optional dependency is needed and not installed.

    Causes: an engine, a tracker, an optimizer or a precision of another package was asked for by its name.
    Do: run the ``pip install`` that the message gives, in the environment of the script.
    """
