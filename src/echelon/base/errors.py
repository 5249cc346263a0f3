"""Errors that state what happened, where, and what to do. All three are preserved when an error is pickled.

docs/errors.md contains their docstrings.
"""

from __future__ import annotations

from echelon.base.messages.translation import gettext as _, in_english
from echelon.base.printable import printable
from echelon.base.rank import known_rank


class EchelonError(Exception):
    """Base class of all echelon errors that users may see.

    Args:
        what: what happened, with the values.
        where: the setting or location; the rank is prepended if it is known.
        do: how to fix it.
    """

    exit_code = 1
    """The exit code of a process that exits because of this error."""

    def __init__(self, what: str, *, where: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        rank = known_rank()
        if rank is not None:
            where = _("rank {rank}, {where}", rank=rank, where=where) if where else _("rank {rank}", rank=rank)
        self.what = what
        self.where: str | None = where or None
        self.do = do

    def __str__(self) -> str:
        # The text may come from a user, a file or another rank.
        return printable("\n".join(self._lines()))

    def in_english(self) -> str:
        """Return the text as it is before translation, which is what programs search."""
        return "\n".join(map(in_english, self._lines()))

    def _lines(self) -> list[str]:
        where = [_("  where: {where}", where=self.where)] if self.where else []
        return [self.what, *where, *([_("  do:    {do}", do=self.do)] if self.do else [])]

    def __reduce__(self) -> tuple[object, ...]:
        # Exception.__reduce__ drops keyword-only arguments, and the rank must remain that of the raising process.
        return (_rebuild, (type(self), self.what, self.where, self.do))


def _rebuild(kind: type[EchelonError], what: str, where: str | None, do: str | None) -> EchelonError:
    error = kind(what, do=do)
    error.where = where
    return error


class ConfigError(EchelonError, ValueError):
    """A setting is unknown, has an invalid value, or conflicts with another setting.

    Causes: a mistyped name or value in a file, flag, environment variable or argument; two settings that contradict each
        other (a train_batch_size that is not micro-batch size x accumulation steps x processes); a setting that this device,
        engine or version does not support.
    Do: correct the setting at the origin that the message names; ``echelon config explain`` shows every value with its origin
        and the values that it overrides.
    """


class UsageError(EchelonError, ValueError):
    """An echelon function was called in a way that cannot work.

    Causes: an argument with the wrong type or value; calls in the wrong order (``backward`` before ``prepare``); something
        that the chosen engine or parity mode does not support; a name from Accelerate or transformers that echelon does not
        support.
    Do: change the call at the end of the traceback, as the message says.
    """


class SetupError(EchelonError, RuntimeError):
    """The process group cannot be initialized.

    Causes: MASTER_ADDR or MASTER_PORT is not set, or another program uses the port; rank 0 is unreachable or has not
        started; ``setup()`` was called a second time with different values; no shared memory is left for ``share_dataset``.
    Do: start the script with ``echelon launch`` or ``torchrun``, which set these variables and find a free port; if you run
        several launchers on one machine, do not set a port.
    """


class CheckpointError(EchelonError, RuntimeError):
    """A checkpoint cannot be written or loaded.

    Causes: a file is missing or damaged, or contains data that could run code; the checkpoint was saved with a different model,
        optimizer or number of loaders; another run is saving to the same folder.
    Do: find the damaged file with ``echelon checkpoint verify FOLDER``, and list the contents with ``echelon checkpoint show
        FOLDER``. Resume from an older checkpoint (``echelon checkpoint ls FOLDER``), or prepare the same objects that were
        saved. To start over, use another folder.
    """


class DesyncError(EchelonError, RuntimeError):
    """The ranks use different shapes or structures, or make different decisions, where they must agree.

    Causes: tensors of different sizes in ``gather`` or ``reduce``; a model or a dataset length that differs between ranks,
        often because each rank drew its own random numbers; a loop that ends earlier on one rank; a collective call under ``if
        rank == 0``.
    Do: compare the values on each rank, which the message lists, and make them equal (``set_seed`` before the model is built;
        ``pad_across_processes`` or ``gather_for_metrics`` for different sizes). Make the same calls on every rank.
    """


class RankTimeoutError(EchelonError, TimeoutError):
    """The ranks named in the message did not reach a barrier or a collective in time.

    Causes: a rank skipped the call (``if rank == 0``, an early ``break``), is still reading or downloading data, hangs, or has
        exited.
    Do: check what the named ranks are doing; download data before the process group is initialized, or under
        ``main_first()``; if the ranks are meant to wait that long, increase the timeout (``process_group(timeout=)``,
        ``InitProcessGroupKwargs(timeout=)``).
    """


class LaunchError(EchelonError, RuntimeError):
    """The processes could not be started, or one of the processes failed.

    Causes: the script raised an exception or was killed on one rank (the message gives the rank and the line); an
        executable is missing, a port is in use, or a system limit prevents a process from starting; a notebook used the
        accelerator before calling ``notebook_launcher``.
    Do: fix the error on the first failing rank, which the message names; the errors on other ranks are consequences of it.
        ``--log_dir`` keeps the full output.
    """


class VerificationError(EchelonError, RuntimeError):
    """An update that ``verify_every`` checked is not the update that one process makes with the same batch.

    Causes: ranks with different weights, buffers, learning rates or gradients; gradients that were not reduced, or clipped by the
        norm of one rank's part; batches with the same samples on several ranks; an optimizer that stepped too often or on some
        ranks only.
    Do: look at the stage, the tensor and the ranks that the message names; ``verify_action="warn"`` continues with a warning.
        Checkpoints from before the update named in the message are not affected.
    """


class LossSpikeError(EchelonError, RuntimeError):
    """``spike_guard`` dropped many updates in a row, and the losses do not come back to their former level.

    Causes: an update before the first of them has spoiled the weights; the learning rate is too high; the data has changed, so that
        higher losses are normal.
    Do: resume from a checkpoint before the step that the message names, with ``spike_guard="rollback"`` (Trainer) or a lower learning
        rate; if the losses are as expected, use ``spike_guard="warn"`` or a larger ``spike_factor``.
    """


class MissingExtraError(EchelonError, ImportError):
    """A required optional dependency, or torch, is not installed.

    Causes: the requested engine, tracker, optimizer or precision needs a package that is not installed; the program runs in
        another Python environment than the one in which the package is installed.
    Do: run the ``pip install`` command from the message in the script's environment (``python -m pip install ...`` uses the
        environment of that ``python``).
    """
