"""Resuming from a checkpoint: which one, whether it fits, and the point in the data at which training resumes."""

from __future__ import annotations

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
    read_noted,
)
from echelon.accelerator.checkpoint.folders import (
    folder_of,
    holds_model,
    holds_training,
    is_own_format,
    newest_whole,
    read_model_files,
    registered_state,
    require_whole,
)
from echelon.accelerator.checkpoint.rng_states import current_random_states
from echelon.accelerator.models.save_weights import load_weights
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsSetEpoch
from echelon.base.warnings import warn
from echelon.checkpoint.formats.transformers import ECHELON_DATA, num_ranks_in, read_random_states
from echelon.trainer.arguments.training_arguments import TrainingArguments, resolve_path
from echelon.trainer.checkpoint.checkpoint_folders import ARGUMENTS_FILE, PREFIX, STATE_FILE, has_adapters
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.checkpoint.transformers_layout import (
    PLACE_NAMES,
    PLACE_OF_RUN,
    load_transformers,
)
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.session import TrainerSession, global_batch_size
from echelon.trainer.state import TrainerState
from echelon.trainer.training_plan import TrainingPlan

__all__ = ["ResumePoint", "ResumedTraining", "best_folder", "find_checkpoint", "load_model_from", "saved_arguments"]

logger = get_logger(__name__)

_WORDS = MappingProxyType({"true": True, "false": False})
_INTERVALS = ("logging_steps", "eval_steps", "save_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a training begins, in its data."""

    epoch: int = 0
    num_batches: int = 0
    """Batches of that epoch that were used."""
    num_to_skip: int = 0
    """Those of them that the loader does not leave out by itself."""
    random_states: Mapping[str, Any] | None = None
    """Of the saved run."""
    is_read_first: bool = False
    """The batches of the first update are read before these are put back, as transformers does."""


# ---- which one -------------------------------------------------------------------------------------------------------


def find_checkpoint(
    args: TrainingArguments, accelerator: Accelerator, output_dir: Path, wanted: str | Path | bool | None
) -> Path | None:
    """Return the checkpoint to resume from, which is whole on every machine; None: a new training.

    Args:
        args: of the training.
        accelerator: of the training.
        output_dir: where True and ``auto`` search.
        wanted: a folder; True: the newest; ``auto``: the newest, if there is one.

    Collective: every rank, where a checkpoint is wanted.

    Raises:
        UsageError: there is none.
        CheckpointError: the folder that was named is damaged, or holds no more than weights.
    """
    wanted = _WORDS.get(str(wanted).lower(), wanted)  # of a command line
    if wanted is None or wanted is False:
        return None
    if wanted is not True and str(wanted) != "auto":
        folder = Path(wanted).expanduser()
        if wanted == args.resume_from_checkpoint:
            folder = resolve_path(args, folder)
        require_whole(accelerator.world, folder)
        if (problem := _no_training_in(folder)) is not None:
            raise CheckpointError(f"{folder} {problem}", do="load its weights into the model, and begin a new training")
        return folder_of(folder)
    found, skipped = newest_whole(accelerator.world, output_dir, prefix=PREFIX, usable=_no_training_in)
    reasons = "\n".join(f"    {path.name}: {why}" for path, why in skipped)
    if found is None and wanted is True:
        raise UsageError(
            f"No valid checkpoint found in output directory ({output_dir})" + (f"\n{reasons}" if reasons else ""),
            where="Trainer.train(resume_from_checkpoint=True)",
            do="give the folder of a checkpoint, or 'auto', which begins anew where there is none",
        )
    if found is None and reasons:
        warn(f"no checkpoint in {output_dir} to go on from: starting from scratch\n{reasons}")
    elif found is None:
        # At the level that is seen by default: who meant another folder must notice.
        logger.warning("no checkpoint in %s: starting from scratch", output_dir)
    elif reasons:
        warn(f"the training goes on from {found}; newer ones were passed over:\n{reasons}")
    return None if found is None else folder_of(found)


def _no_training_in(folder: Path) -> str | None:
    if holds_training(folder):
        return None
    return "holds weights only (save_only_model): there is no optimizer to go on with"


def saved_arguments(folder: Path) -> dict[str, Any]:
    """Return the arguments of the training that wrote ``folder``; empty where they are not JSON."""
    path = folder / ARGUMENTS_FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


class ResumedTraining:
    """A training that goes on from a checkpoint.

    Args:
        hooks: of the Trainer.
        session: of the Trainer.
        folder: the checkpoint.
        allows_changed_data: go on from the middle of an epoch although the data differ from the saved training's.
    """

    def __init__(
        self, hooks: TrainerHooks, session: TrainerSession, folder: Path, *, allows_changed_data: bool
    ) -> None:
        self._hooks = hooks
        self._session = session
        self._folder = folder
        self._allows_changed_data = allows_changed_data
        self._size = session.update_size(hooks.args)
        self._saved_batch_size: int | None = None

    def extend_plan(self, plan: TrainingPlan) -> TrainingPlan:
        """Return ``plan`` with the steps that its epochs need from the checkpoint on, where more were made than it counts up to there.

        An epoch of fewer steps than in the saved training (fewer samples, larger batches) would end the training too soon.
        """
        hooks, folder = self._hooks, self._folder
        if hooks.args.max_steps > 0 or not plan.is_sized:
            return plan
        state = TrainerState.load_from_json(folder / STATE_FILE)
        batches = plan.batches_per_epoch
        accumulation = 1 if hooks.accelerator.parity != "off" else self._size.accumulation_steps
        if is_own_format(folder):
            place = TrainCursor(**registered_state(folder, 0))
            epoch, used = (place.epoch + 1, 0) if place.is_over else (place.epoch, place.num_batches)
            used = min(used * place.batch_size // plan.batch_size, batches)
            beyond = (
                place.num_steps_beyond
            )  # of data that give more than their length says, which the plan does not count
        else:
            epoch, used = int(state.epoch or 0), round(((state.epoch or 0) % 1) * batches)
            beyond = _noted_place(folder).get("num_steps_beyond", 0)
        here = epoch * plan.steps_per_epoch + -(-used // accumulation) + beyond
        more = state.global_step - here
        if more <= 0 or plan.max_steps <= here:
            return plan
        max_steps = plan.max_steps + more
        logger.warning(
            "%s was saved after %d steps, and with the data and batches of now it would be %d: the training has %d steps in place of "
            "%d, so that its epochs are whole",
            folder,
            state.global_step,
            here,
            max_steps,
            plan.max_steps,
        )
        return replace(plan, max_steps=max_steps)

    def restore_state(self, plan: TrainingPlan) -> TrainerState:
        """Return the saved state for a training of ``plan``, and give callbacks theirs back where that is asked for."""
        hooks, folder, args = self._hooks, self._folder, self._hooks.args
        batch_size = self._size.batch_size
        state = TrainerState.load_from_json(folder / STATE_FILE)
        saved = {name: getattr(state, name) for name in _INTERVALS}
        best = state.best_model_checkpoint
        if best is not None and not best_folder(args, self._session.output_dir(args), best).is_dir():
            warn(f"the best checkpoint, {best}, is not there any more")
            state.best_model_checkpoint = None
        state.max_steps, state.num_train_epochs = plan.max_steps, plan.num_epochs
        state.is_local_process_zero = hooks.is_local_process_zero()
        state.is_world_process_zero = hooks.is_world_process_zero()
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
            warn(f"the training that goes on from {folder} has other arguments: {', '.join(others)}")
        self._saved_batch_size, state.train_batch_size = state.train_batch_size, batch_size
        if args.restore_callback_states_from_checkpoint:
            hooks.callback_handler.restore(state.stateful_callbacks)
        return state

    def load(self, loader: Any, plan: TrainingPlan) -> ResumePoint:
        """Load the checkpoint into what was prepared, and return where in the data the training begins.

        Collective: every rank.

        Raises:
            CheckpointError: it is another model's, or of the middle of an epoch that means nothing here.
        """
        start = (self._load_own if is_own_format(self._folder) else self._load_foreign)(loader, plan)
        logger.info("resuming from %s: epoch %d, step %d", self._folder, start.epoch, self._hooks.state.global_step)
        return start

    def _load_own(self, loader: Any, plan: TrainingPlan) -> ResumePoint:
        folder, accelerator, args = self._folder, self._hooks.accelerator, self._hooks.args
        place = TrainCursor(**registered_state(folder, 0))
        self._require_same_run(place)
        is_prepared = hasattr(loader, "last_step")  # a loader of the user's own begins at its beginning
        goes_on = (
            is_prepared
            and not args.ignore_data_skip
            and not place.is_within_update
            and place.batch_size == plan.batch_size
        )
        policy = DataPolicy(
            allows_changes=self._allows_changed_data,
            is_at_boundary=place.is_over or args.ignore_data_skip or not (place.num_batches or place.is_within_update),
            finds_batches=place.batch_size != plan.batch_size,
        )
        hook = accelerator.register_load_state_pre_hook(_load_hook)
        try:
            with accelerator.checkpoints.data_may(policy):
                if goes_on:
                    accelerator.resume(folder)
                else:
                    accelerator.load_state(folder)
        finally:
            hook.remove()
        if place.schedule is not None:
            self._hooks.lr_scheduler.load_state_dict(place.schedule)
        random_states = current_random_states()
        if place.is_over:
            return ResumePoint(epoch=place.epoch + 1, random_states=random_states)
        if goes_on:
            # Of data that have grown since its last batch, an epoch that was read to its end has no rest.
            is_read = place.num_batches > 0 and accelerator.checkpoints.pass_was_over(folder, loader)
            num_batches = max(place.num_batches, plan.batches_per_epoch) if is_read else place.num_batches
            return ResumePoint(epoch=place.epoch, num_batches=num_batches, random_states=random_states)
        if args.ignore_data_skip:
            _begin_anew(loader, place.epoch)
            return ResumePoint(epoch=place.epoch, random_states=random_states)
        self._require_same_ranks(place.world_size, within=place.num_batches > 0)
        num_used = place.num_batches * place.batch_size // plan.batch_size
        if num_used * plan.batch_size != place.num_batches * place.batch_size:
            warn(
                f"the saved training had used {place.num_batches * place.batch_size} samples of this epoch on each process, which "
                f"is no number of batches of {plan.batch_size}: some of them come again"
            )
        is_exact = accelerator.parity != "off"  # a loader of the exact modes is where the checkpoint was
        return ResumePoint(
            epoch=place.epoch,
            num_batches=num_used,
            num_to_skip=0 if is_exact and is_prepared else num_used,
            random_states=random_states,
            is_read_first=True,
        )

    def _load_foreign(self, loader: Any, plan: TrainingPlan) -> ResumePoint:
        hooks, folder, accelerator = self._hooks, self._folder, self._hooks.accelerator
        if accelerator.parity != "off":
            raise CheckpointError(
                f"{folder} was written by transformers or in its layout, which does not say what parity={accelerator.parity!r} needs",
                do="train with parity='off', or go on from a checkpoint that was saved with this parity",
            )
        load_model_from(hooks.model, folder)
        load_transformers(hooks, folder, self._session.optimizer.scheduler)
        random_states = read_random_states(folder, rank=accelerator.process_index)
        if random_states is None:
            warn(
                f"{folder} has no random states of rank {accelerator.process_index}: its numbers go on from where they are"
            )
        epoch, used = self._place_by_epoch(loader, plan)
        if hooks.args.ignore_data_skip or not used:
            return ResumePoint(epoch=epoch, random_states=random_states)
        self._require_same_ranks(num_ranks_in(folder), within=True)
        return ResumePoint(
            epoch=epoch, num_batches=used, num_to_skip=used, random_states=random_states, is_read_first=True
        )

    def _place_by_epoch(self, loader: Any, plan: TrainingPlan) -> tuple[int, int]:
        """Return the epoch and the batches in it that were used, of a checkpoint of transformers' layout.

        Its steps say it, if an epoch has as many here as there; by the part of an epoch that it notes, others are known.

        Raises:
            CheckpointError: the data have changed in the middle of an epoch, and that is not allowed.
        """
        hooks, folder = self._hooks, self._folder
        args, state, batches = hooks.args, hooks.state, plan.batches_per_epoch
        epoch, num_steps = divmod(state.global_step, plan.steps_per_epoch)
        used = num_steps * self._size.accumulation_steps
        noted = state.epoch
        if not plan.is_sized or noted is None:
            return epoch, used
        facts = read_facts(folder / ECHELON_DATA)
        saved_ranks, ranks = num_ranks_in(folder), hooks.accelerator.num_processes
        changes = changes_since(facts, loader, num_saved=saved_ranks, num_ranks=ranks)
        wrong = [change.what for change in changes if change.fact != "batches"]
        expected = epoch + min(used, batches) / batches
        has_other_steps = abs(expected - noted) * batches > 0.5
        is_within = abs(noted - round(noted)) * batches > 0.5
        has_other_batches = self._saved_batch_size not in (None, self._size.batch_size)  # reported already
        if has_other_steps and is_within and facts is None and not has_other_batches:
            wrong.append(
                f"step {state.global_step} is in epoch {noted:g} there, and here it is in epoch {expected:g} (other data, another "
                "number of processes, or other gradient_accumulation_steps)"
            )
        ours = _noted_place(folder)
        if ours and not changes and not has_other_batches:
            for name in PLACE_OF_RUN:
                setattr(self._session.cursor, name, ours[name])
            return (ours["epoch"] + 1, 0) if ours["is_over"] else (ours["epoch"], ours["num_batches"])
        if not has_other_steps and not wrong:
            return epoch, used
        if not is_within or args.ignore_data_skip:
            if wrong:
                warn(f"{folder} was saved with other data, and the next epoch is over those of now: {'; '.join(wrong)}")
            return (round(noted), 0) if not is_within else (int(noted), 0)
        epoch, part = int(noted), noted - int(noted)
        size = plan.batch_size * hooks.accelerator.num_processes
        if facts is not None and facts.num_samples is not None:  # samples that were used, as whole batches of now
            used = round(part * facts.num_samples) // size
        else:
            used = int(part * batches + 1e-6)
        place = f"it goes on after {used * size} of {plan.num_examples} samples of epoch {epoch}"
        if wrong and not self._allows_changed_data:
            raise changed_data_error(folder, wrong, [place])
        if wrong:
            warn(f"{folder} is of the middle of an epoch over other data ({'; '.join(wrong)}): {place}")
        return epoch, used

    def _require_same_run(self, place: TrainCursor) -> None:
        """Raise where the place in a checkpoint means something else here."""
        folder, accelerator = self._folder, self._hooks.accelerator
        if place.parity != accelerator.parity:
            raise CheckpointError(
                f"{folder} was saved with parity={place.parity!r}, and this training has parity={accelerator.parity!r}",
                do="resume with the parity that it was saved with",
            )
        if accelerator.parity == "off":
            return
        shards = accelerator.config.value.canonical_shards
        if accelerator.parity == "bitwise" and place.canonical_shards != shards:
            raise CheckpointError(
                f"{folder} was saved with canonical_shards={place.canonical_shards}, and this training has {shards}: the bits "
                "would be others",
                do=f"set canonical_shards={place.canonical_shards}",
            )
        here = global_batch_size(self._hooks.args, accelerator.num_processes)
        if place.batch_size != here:
            raise CheckpointError(
                f"{folder} was saved with global_batch_size={place.batch_size}, and this training has "
                f"{here}: its updates would be others",
                do=f"set global_batch_size={place.batch_size}, or leave it out: it is kept then",
            )

    def _require_same_ranks(self, saved: int, *, within: bool) -> None:
        folder, here = self._folder, self._hooks.accelerator.num_processes
        if within and self._hooks.accelerator.parity == "off" and saved not in (0, here):
            raise CheckpointError(
                f"{folder} was saved in the middle of an epoch on {saved} processes, and this run has {here}: samples would be "
                "repeated or lost",
                where="parity='off'",
                do=f"resume on {saved} processes, set ignore_data_skip=True, which restarts the epoch, or train with "
                "parity='exact', which resumes on any number",
            )


def best_folder(args: TrainingArguments, output_dir: Path, best: str) -> Path:
    """Return where the best checkpoint is: as it was noted, or, where the whole folder was moved, in ``output_dir``."""
    noted, beside = resolve_path(args, best), output_dir / Path(best).name
    return beside if beside.is_dir() and not noted.is_dir() else noted


def _noted_place(folder: Path) -> Mapping[str, Any]:
    """Return what echelon has noted beside transformers' files; nothing in checkpoints of transformers, and of older versions."""
    place: Mapping[str, Any] = read_noted(folder / ECHELON_DATA).get("place", {})
    return place if place.keys() >= set(PLACE_NAMES) else {}


def _begin_anew(loader: Any, epoch: int) -> None:
    """Let the next pass begin at its beginning, whatever was loaded."""
    if isinstance(loader, SupportsSetEpoch):
        loader.set_epoch(epoch + 1)
        loader.set_epoch(epoch)


# ---- weights ---------------------------------------------------------------------------------------------------------


def _load_hook(models: list[nn.Module], input_dir: str) -> None:
    """Load the weights from the files that others read, unless the checkpoint holds them itself."""
    folder = Path(input_dir)
    if not (is_own_format(folder) and holds_model(folder)):
        load_model_from(models[0], folder)
        del models[0]


def load_model_from(model: nn.Module, folder: Path) -> None:
    """Load the weights in ``folder`` into ``model``; of one with adapters, these.

    Raises:
        UsageError: there are none.
        CheckpointError: they are another model's, or damaged.
    """
    if has_adapters(model) and any(folder.glob("adapter_model.*")):
        names: Any = model.active_adapters
        model.load_adapter(str(folder), (names() if callable(names) else names)[0], is_trainable=True)  # type: ignore[operator]
        return
    load_weights(model, read_model_files(folder), source=folder)
