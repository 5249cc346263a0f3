"""Resuming: finds a checkpoint, checks that it fits this run, and computes the position in the data."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from echelon.accelerator import Accelerator
from echelon.accelerator.checkpoint.changed_data import (
    DataPolicy,
    changed_data_error,
    changes_since,
    read_facts,
    read_optional_json,
)
from echelon.accelerator.checkpoint.folders import (
    holds_model,
    holds_training,
    is_own_format,
    newest_whole,
    registered_state,
    require_whole,
)
from echelon.accelerator.rng_states import current_random_states
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.protocols import SupportsSetEpoch
from echelon.base.warnings import warn
from echelon.checkpoint import storage
from echelon.checkpoint.commit import place_of
from echelon.checkpoint.formats.layouts import layout_of
from echelon.checkpoint.formats.transformers import (
    ECHELON_DATA,
    OPTIMIZER,
    SCHEDULER,
    num_ranks_in,
    read_random_states,
    read_state,
)
from echelon.checkpoint.object_store import Location, ObjectPath
from echelon.trainer.arguments.training_arguments import TrainingArguments, resolve_path
from echelon.trainer.checkpoint.checkpoint_folders import ARGUMENTS_FILE, PREFIX, STATE_FILE, best_folder, is_folder
from echelon.trainer.checkpoint.train_cursor import CURSOR_FIELDS, LENGTH_FIELDS, TrainCursor
from echelon.trainer.session import TrainerSession, global_batch_size
from echelon.trainer.state import TrainerState
from echelon.trainer.trainer_methods import TrainerMethods, is_overridden
from echelon.trainer.training_plan import TrainingPlan

logger = get_logger(__name__)

_WORDS = MappingProxyType({"true": True, "false": False})
_INTERVALS = ("logging_steps", "eval_steps", "save_steps")


_NOT_NEEDED = ("average",)  # a run may begin to average the weights, or end it, which the Accelerator says


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The position in the training data at which a run starts."""

    checkpoint: str | None = None
    """The checkpoint that the run resumes from."""
    epoch: int = 0
    num_batches: int = 0
    """Number of batches of this epoch that the saved run has consumed."""
    num_to_skip: int = 0
    """Number of consumed batches that the loop must skip because the loader does not resume after them."""
    random_states: Mapping[str, Any] | None = None
    """The saved run's RNG states."""
    restores_rng_after_reading: bool = False
    """Whether to restore the RNG states only after the first update's batches are read, as transformers does."""


# ---- finding a checkpoint -------------------------------------------------------------------------------------------------------


def find_checkpoint(
    args: TrainingArguments, accelerator: Accelerator, output_dir: Location, wanted: str | Path | bool | None
) -> Path | None:
    """Return the checkpoint to resume from, verified on every machine, or None to start from scratch.

    Args:
        output_dir: directory to search if ``wanted`` is True or ``auto``.
        wanted: path to a checkpoint, True for the newest one, or ``auto`` for the newest one if any exists.

    Collective: call on every rank if a checkpoint is requested.

    Raises:
        UsageError: no checkpoint exists.
        CheckpointError: the requested checkpoint is damaged or holds only weights.
    """
    wanted = _WORDS.get(str(wanted).lower(), wanted)  # from a command line
    if wanted is None or wanted is False:
        return None
    if wanted is not True and str(wanted) != "auto":
        place = storage.location(wanted)
        if isinstance(place, ObjectPath):
            folder = accelerator.checkpoints.store.fetch(place)
        else:
            folder = resolve_path(args, place) if wanted == args.resume_from_checkpoint else place
        require_whole(accelerator.world, folder)
        if (problem := _no_training_in(folder)) is not None:
            raise CheckpointError(
                f"{folder} {problem}", do=("load its weights into the model and start a new training run")
            )
        return place_of(folder)
    store = accelerator.checkpoints.store
    found, skipped = newest_whole(
        accelerator.world, output_dir, prefix=PREFIX, usable=_no_training_in, fetch=store.fetch
    )
    reasons = "\n".join(f"    {path.name}: {why}" for path, why in skipped)
    if found is None and wanted is True:
        raise UsageError(
            f"No valid checkpoint found in output directory ({output_dir})" + (f"\n{reasons}" if reasons else ""),
            where="Trainer.train(resume_from_checkpoint=True)",
            do="pass the path to a checkpoint, or pass 'auto' to start from scratch if none exists",
        )
    if found is None and reasons:
        text = N_("no usable checkpoint in {output_dir}: starting from scratch\n{reasons}")
        warn(_(text, output_dir=output_dir, reasons=reasons))
    elif found is None:
        # A warning, because a user with a wrong output_dir must notice.
        logger.warning(N_("no checkpoint in %s: starting from scratch"), output_dir)
    elif reasons:
        text = N_("resuming from {found}; newer checkpoints were skipped:\n{reasons}")
        warn(_(text, found=None if found is None else store.origin(found), reasons=reasons))
    return None if found is None else place_of(found)


def _no_training_in(folder: Path) -> str | None:
    if layout_of(folder) == "sharded":
        return "has the format of torch.distributed.checkpoint, from which a Trainer cannot resume (an Accelerator can)"
    if holds_training(folder):
        return None
    return "holds only weights (save_only_model), so training cannot resume from it"


def saved_arguments(folder: Path) -> dict[str, Any]:
    """Return the training arguments stored in ``folder``; empty if ``folder`` does not store them as JSON."""
    path = folder / ARGUMENTS_FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def saved_batch_size(folder: Path) -> int | None:
    """Return the saved run's batch size per process, or None if ``folder`` does not store it."""
    return TrainerState.load_from_json(folder / STATE_FILE).train_batch_size


@dataclass
class _OwnState:
    """How the training state of a checkpoint in echelon's format is loaded."""

    policy: DataPolicy
    resumes_loader: bool
    schedule: dict[str, Any] | None
    """The state of a scheduler that the Accelerator does not save."""
    is_loaded: bool = False
    scaler: dict[str, Any] | None = None
    """The loaded state of the loss scaler."""


class ResumedTraining:
    """Resumes a run from a checkpoint.

    Args:
        folder: the checkpoint.
        allows_changed_data: resume in the middle of an epoch even if the dataset has changed.
    """

    def __init__(
        self, trainer: TrainerMethods, session: TrainerSession, folder: Path, *, allows_changed_data: bool
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._folder = folder
        self._allows_changed_data = allows_changed_data
        self._size = session.update_size(trainer.args)
        self._saved_batch_size: int | None = None
        self._own: _OwnState | None = None  # for a checkpoint in echelon's format

    def extend_plan(self, plan: TrainingPlan) -> TrainingPlan:
        """Return ``plan`` with ``max_steps`` raised if the saved run took more steps than ``plan`` needs to reach the
        saved position.

        Otherwise, a run with fewer steps per epoch (fewer samples or larger batches) would end too early.
        """
        trainer, folder = self._trainer, self._folder
        if trainer.args.max_steps > 0 or not plan.is_sized:
            return plan
        state = TrainerState.load_from_json(folder / STATE_FILE)
        batches = plan.batches_per_epoch
        accumulation = 1 if trainer.accelerator.parity != "off" else self._size.accumulation_steps
        if is_own_format(folder):
            cursor = TrainCursor(**registered_state(folder, 0))
            epoch, used = (cursor.epoch + 1, 0) if cursor.is_over else (cursor.epoch, cursor.num_batches)
            used = min(used * cursor.batch_size // plan.batch_size, batches)
            beyond = cursor.num_steps_beyond
        else:
            epoch, used = int(state.epoch or 0), round(((state.epoch or 0) % 1) * batches)
            beyond = _saved_cursor_fields(folder).get("num_steps_beyond", 0)
        here = epoch * plan.steps_per_epoch + -(-used // accumulation) + beyond
        more = state.global_step - here
        if more <= 0 or plan.max_steps <= here:
            return plan
        max_steps = plan.max_steps + more
        logger.warning(
            N_(
                "%s was saved after %d steps, but its position is step %d with the current data and batch size. Training "
                "runs for %d steps "
                "instead of %d to complete all epochs"
            ),
            folder,
            state.global_step,
            here,
            max_steps,
            plan.max_steps,
        )
        return replace(plan, max_steps=max_steps)

    def restore_state(self, plan: TrainingPlan) -> TrainerState:
        """Return the saved state, adapted to ``plan``."""
        trainer, folder, args = self._trainer, self._folder, self._trainer.args
        batch_size = self._size.batch_size
        state = TrainerState.load_from_json(folder / STATE_FILE)
        saved = {name: getattr(state, name) for name in _INTERVALS}
        best = state.best_model_checkpoint
        if best is not None and not is_folder(best_folder(args, self._session.checkpoint_dir(args), best)):
            warn(_("the best checkpoint, {best}, no longer exists", best=best))
            state.best_model_checkpoint = None
        state.max_steps, state.num_train_epochs = plan.max_steps, plan.num_epochs
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        state.compute_steps(args, plan.max_steps)
        strategies = dict(zip(_INTERVALS, (args.logging_strategy, args.eval_strategy, args.save_strategy)))
        others = [
            f"{name}={getattr(state, name)} (saved: {value})"
            for name, value in saved.items()
            if str(strategies[name]) == "steps" and value != getattr(state, name)
        ]
        if state.train_batch_size not in (None, batch_size):
            others.append(f"per_device_train_batch_size={batch_size} (saved: {state.train_batch_size})")
        if others:
            warn(
                _(
                    "the training arguments differ from those saved in {folder}: {others}; training continues with the "
                    "new ones",
                    folder=folder,
                    others=", ".join(others),
                )
            )
        self._saved_batch_size, state.train_batch_size = state.train_batch_size, batch_size
        return state

    def load(self, loader: Any, plan: TrainingPlan) -> ResumePoint:
        """Load the checkpoint into the prepared objects and return the position in the data.

        Collective: call on every rank.

        Raises:
            CheckpointError: the checkpoint belongs to another model, or its position in the data is not valid in this
                run.
        """
        start = (self._load_own if is_own_format(self._folder) else self._load_transformers)(loader, plan)
        start = replace(start, checkpoint=str(self._folder))
        state = self._trainer.state
        epoch = start.epoch if state.epoch is None else state.epoch
        # A warning, because only these are visible by default.
        logger.warning(
            N_("resuming from %s: epoch %.4g, step %d of %d"),
            self._trainer.accelerator.checkpoints.store.origin(self._folder),
            epoch,
            state.global_step,
            plan.max_steps,
        )
        return start

    def _load_own(self, loader: Any, plan: TrainingPlan) -> ResumePoint:
        folder, accelerator, args = self._folder, self._trainer.accelerator, self._trainer.args
        cursor = TrainCursor(**registered_state(folder, 0))
        self._require_same_run(cursor)
        is_prepared = hasattr(loader, "last_step")  # else a user's loader, which has no state to restore
        resumes_loader = (
            is_prepared
            and not args.ignore_data_skip
            and not cursor.is_within_update
            and cursor.batch_size == plan.batch_size
        )
        policy = DataPolicy(
            allows_changes=self._allows_changed_data,
            is_at_boundary=cursor.is_over
            or args.ignore_data_skip
            or not (cursor.num_batches or cursor.is_within_update),
            finds_batches=cursor.batch_size != plan.batch_size,
            is_of_trainer=True,
        )

        own = _OwnState(policy=policy, resumes_loader=resumes_loader, schedule=cursor.schedule)
        self._load_unless_overridden(own)
        random_states = current_random_states()
        if cursor.is_over:
            return ResumePoint(epoch=cursor.epoch + 1, random_states=random_states)
        if resumes_loader:
            # An epoch that was read to its end stays complete even if the dataset has grown since.
            is_read = cursor.num_batches > 0 and accelerator.checkpoints.pass_was_over(folder, loader)
            num_batches = max(cursor.num_batches, plan.batches_per_epoch) if is_read else cursor.num_batches
            return ResumePoint(epoch=cursor.epoch, num_batches=num_batches, random_states=random_states)
        if args.ignore_data_skip:
            if isinstance(loader, SupportsSetEpoch):
                # Starts the pass at the first batch, regardless of the state that was loaded.
                loader.set_epoch(cursor.epoch + 1)
                loader.set_epoch(cursor.epoch)
            return ResumePoint(epoch=cursor.epoch, random_states=random_states)
        self._require_same_ranks(cursor.world_size, within=cursor.num_batches > 0)
        num_used = cursor.num_batches * cursor.batch_size // plan.batch_size
        if num_used * plan.batch_size != cursor.num_batches * cursor.batch_size:
            warn(
                _(
                    "the saved run consumed {number} samples of this epoch per process, which is not a multiple of the "
                    "batch size {batch_size}, so some samples are repeated",
                    number=cursor.num_batches * cursor.batch_size,
                    batch_size=plan.batch_size,
                )
            )
        is_exact = accelerator.parity != "off"  # then load_state has restored the loader's position
        return ResumePoint(
            epoch=cursor.epoch,
            num_batches=num_used,
            num_to_skip=0 if is_exact and is_prepared else num_used,
            random_states=random_states,
            restores_rng_after_reading=True,
        )

    def load_optimizer_and_scheduler(self, folder: Path) -> None:
        """Implement ``Trainer._load_optimizer_and_scheduler``.

        A checkpoint in echelon's format is loaded whole, with the weights and the position in the data.
        """
        if self._own is not None:
            self._load_all(self._own)
            return
        state = read_state(folder)
        found = {OPTIMIZER: state.optimizer, SCHEDULER: state.scheduler}
        missing = [name for name, one in found.items() if one is None]
        if missing:
            raise CheckpointError(
                f"{folder} has no {' and no '.join(missing)}, so training cannot resume from it",
                do="load its weights into the model and start a new training run",
            )
        self._trainer.optimizer.load_full_state_dict(state.optimizer)
        self._session.optimizer.scheduler.load_state_dict(state.scheduler)

    def load_scaler(self, folder: Path) -> None:
        """Implement ``Trainer._load_scaler``."""
        scaler = self._trainer.accelerator.scaler
        state = read_state(folder).scaler if self._own is None else self._own.scaler
        if scaler is not None and state:
            scaler.load_state_dict(state)

    def _load_unless_overridden(self, own: _OwnState) -> None:
        """Load the training state, except for parts whose private loading method is overridden.

        If an override does not call ``super()._load_optimizer_and_scheduler(...)``, the optimizer and the scheduler
        stay as the override leaves them. The same applies to ``_load_scaler`` and the loss scaler.
        """
        trainer, self._own, folder = self._trainer, own, str(self._folder)
        scaler = trainer.accelerator.scaler
        fresh = {} if scaler is None else scaler.state_dict()
        trainer._load_optimizer_and_scheduler(folder)
        if not own.is_loaded:
            parts = (trainer.optimizer, trainer.lr_scheduler)
            states = [copy.deepcopy(part.state_dict()) for part in parts]
            self._load_all(own)
            for part, state in zip(parts, states):
                part.load_state_dict(state)
        own.scaler = {} if scaler is None else scaler.state_dict()
        if scaler is not None and fresh:
            scaler.load_state_dict(fresh)
        trainer._load_scaler(folder)

    def _load_all(self, own: _OwnState) -> None:
        accelerator = self._trainer.accelerator
        own.is_loaded = True
        hook = accelerator.register_load_state_pre_hook(self._load_weights)
        try:
            with accelerator.checkpoints.use_data_policy(own.policy):
                if own.resumes_loader:
                    accelerator.resume(self._folder, allow_missing=_NOT_NEEDED)
                else:
                    accelerator.load_state(self._folder, allow_missing=_NOT_NEEDED)
        finally:
            hook.remove()
        if own.schedule is not None:
            self._trainer.lr_scheduler.load_state_dict(own.schedule)

    def _load_weights(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the weights from the files that ``save_model`` wrote, unless the checkpoint itself holds them."""
        folder, session = Path(input_dir), self._session
        holds = is_own_format(folder) and holds_model(folder)
        if holds and not is_overridden(self._trainer, "_load_from_checkpoint"):
            return  # the Accelerator loads them, but an override is called all the same
        session.keeps_weights_with_state, session.loads_weights_with_state = holds, False
        try:
            self._trainer._load_from_checkpoint(str(folder))
        finally:
            session.keeps_weights_with_state = False
        if not session.loads_weights_with_state:
            del models[0]

    def _load_transformers(self, loader: Any, plan: TrainingPlan) -> ResumePoint:
        trainer, folder, accelerator = self._trainer, self._folder, self._trainer.accelerator
        if accelerator.parity != "off":
            raise CheckpointError(
                f"{folder} is in transformers' format, which lacks the state that parity={accelerator.parity!r} needs",
                do="train with parity='off', or resume from a checkpoint that was saved with this parity",
            )
        for load in (trainer._load_from_checkpoint, trainer._load_optimizer_and_scheduler, trainer._load_scaler):
            load(str(folder))
        random_states = read_random_states(folder, rank=accelerator.process_index)
        if random_states is None:
            warn(
                _(
                    "{folder} has no RNG states for rank {process_index}; its random number generators keep their "
                    "current state",
                    folder=folder,
                    process_index=accelerator.process_index,
                )
            )
        epoch, used = self._infer_position(loader, plan)
        if trainer.args.ignore_data_skip or not used:
            return ResumePoint(epoch=epoch, random_states=random_states)
        self._require_same_ranks(num_ranks_in(folder), within=True)
        return ResumePoint(
            epoch=epoch,
            num_batches=used,
            num_to_skip=used,
            random_states=random_states,
            restores_rng_after_reading=True,
        )

    def _infer_position(self, loader: Any, plan: TrainingPlan) -> tuple[int, int]:
        """Return the epoch and the number of its consumed batches, for a checkpoint in transformers' format.

        echelon stores the position, which is valid if the data has not changed. Otherwise (or if transformers saved the
        checkpoint) it is computed from the global step if an epoch has the same number of steps as in the saved run, and
        from the saved fractional epoch if not.

        Raises:
            CheckpointError: the checkpoint was saved mid-epoch, the data has changed since, and ``allow_changed_data``
                is not set.
        """
        trainer, folder, size = self._trainer, self._folder, self._size
        state, batches = trainer.state, plan.batches_per_epoch
        saved_epoch = state.epoch if plan.is_sized else None  # without a length, it is no measure of the position
        facts = read_facts(folder / ECHELON_DATA)
        saved_ranks, ranks = num_ranks_in(folder), trainer.accelerator.num_processes
        changes = changes_since(facts, loader, num_saved=saved_ranks, num_ranks=ranks)
        has_other_batches = self._saved_batch_size not in (None, size.batch_size)  # already reported
        saved_fields = _saved_cursor_fields(folder)
        if saved_fields and not changes and not has_other_batches:
            for name in LENGTH_FIELDS:
                setattr(self._session.cursor, name, saved_fields[name])
            return _stored_position(saved_fields)
        wrong = [change.what for change in changes if change.fact != "batches"]
        if saved_epoch is None:
            saved = TrainerState.load_from_json(folder / STATE_FILE)
            if saved_fields:
                epoch, used = _stored_position(saved_fields)
            elif saved.epoch is None:
                epoch, used = 0, saved.global_step * size.accumulation_steps
            else:  # a fraction of the batches of the whole run, although each pass has fewer
                epoch = int(saved.epoch)
                used = round((saved.epoch - epoch) * saved.max_steps * size.accumulation_steps)
            used = used * (self._saved_batch_size or size.batch_size) // size.batch_size
            is_within, resumes = used > 0, f"training resumes after {used} batches of epoch {epoch}"
        else:
            epoch, num_steps = divmod(state.global_step, plan.steps_per_epoch)
            used = num_steps * size.accumulation_steps
            expected = epoch + min(used, batches) / batches
            has_other_steps = abs(expected - saved_epoch) * batches > 0.5
            is_within = abs(saved_epoch - round(saved_epoch)) * batches > 0.5
            if has_other_steps and is_within and facts is None and not has_other_batches:
                wrong.append(
                    f"step {state.global_step} was in epoch {saved_epoch:g} of the saved run and is in epoch {expected:g} "
                    "of this run (the data, the number of processes or gradient_accumulation_steps has changed)"
                )
            if not has_other_steps and not wrong:
                return epoch, used
            if not is_within or trainer.args.ignore_data_skip:
                if wrong:
                    warn(
                        _(
                            "{folder} was saved with different data; the next epoch uses the current data: {wrong}",
                            folder=folder,
                            wrong=_("; ").join(wrong),
                        )
                    )
                return (round(saved_epoch), 0) if not is_within else (int(saved_epoch), 0)
            epoch, part = int(saved_epoch), saved_epoch - int(saved_epoch)
            num_samples = plan.batch_size * trainer.accelerator.session.num_readers
            if facts is not None and facts.num_samples is not None:  # consumed samples, in whole current batches
                used = round(part * facts.num_samples) // num_samples
            else:
                used = int(part * batches + 1e-6)
            text = N_("training resumes after {used} of {total} samples of epoch {epoch}")
            resumes = _(text, used=used * num_samples, total=plan.num_examples, epoch=epoch)
        if wrong and is_within and not self._allows_changed_data:
            raise changed_data_error(folder, wrong, [resumes])
        if wrong and saved_epoch is not None:
            warn(
                _(
                    "{folder} was saved in the middle of an epoch over different data ({wrong}); {resumes}",
                    folder=folder,
                    wrong=_("; ").join(wrong),
                    resumes=resumes,
                )
            )
        elif wrong:
            warn(
                _(
                    "{folder} was saved with different data ({wrong}); training resumes after {used} batches "
                    "of epoch {epoch}",
                    folder=folder,
                    wrong=_("; ").join(wrong),
                    used=used,
                    epoch=epoch,
                )
            )
        return epoch, used

    def _require_same_run(self, cursor: TrainCursor) -> None:
        """Raise if the saved position is not valid with this run's settings."""
        folder, accelerator = self._folder, self._trainer.accelerator
        if cursor.parity != accelerator.parity:
            raise CheckpointError(
                f"{folder} was saved with parity={cursor.parity!r}, but this run has parity={accelerator.parity!r}",
                do=f"set parity={cursor.parity!r}",
            )
        if accelerator.parity == "off":
            return
        shards = accelerator.config.value.canonical_shards
        if accelerator.parity == "bitwise" and cursor.canonical_shards != shards:
            raise CheckpointError(
                f"{folder} was saved with canonical_shards={cursor.canonical_shards}, but this run has {shards}, so "
                "the results would not be bit-identical",
                do=f"set canonical_shards={cursor.canonical_shards}",
            )
        here = global_batch_size(self._trainer.args, accelerator.session.num_readers)
        if cursor.batch_size != here:
            raise CheckpointError(
                f"{folder} was saved with global_batch_size={cursor.batch_size}, but this run has {here}, so its "
                "updates would differ",
                do=f"remove global_batch_size, or set global_batch_size={cursor.batch_size}",
            )

    def _require_same_ranks(self, saved: int, *, within: bool) -> None:
        folder, here = self._folder, self._trainer.accelerator.session.num_readers
        if within and self._trainer.accelerator.parity == "off" and saved not in (0, here):
            raise CheckpointError(
                f"{folder} was saved in the middle of an epoch on {saved} processes, but this run has {here}, so "
                "samples would be repeated or skipped",
                where="parity='off'",
                do=(
                    f"resume on {saved} processes, set ignore_data_skip=True to restart the epoch, or train with "
                    "parity='exact', which can resume on any number of processes"
                ),
            )


def _saved_cursor_fields(folder: Path) -> Mapping[str, Any]:
    """Return the cursor fields that echelon adds to transformers' files; empty for transformers' own checkpoints."""
    found: Mapping[str, Any] = read_optional_json(folder / ECHELON_DATA).get("place", {})
    return found if found.keys() >= set(CURSOR_FIELDS) else {}


def _stored_position(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epoch and the number of its consumed batches from saved cursor fields."""
    return (fields["epoch"] + 1, 0) if fields["is_over"] else (fields["epoch"], fields["num_batches"])
