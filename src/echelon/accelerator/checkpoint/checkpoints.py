"""Saves and loads an Accelerator's state."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.accelerator.checkpoint.accelerate_layout import (
    collect_state,
    load_accelerator_state,
    load_custom_state,
    require_custom_states,
    require_plain,
)
from echelon.accelerator.checkpoint.changed_data import DataPolicy
from echelon.accelerator.checkpoint.checkpoint_store import PREFIX, CheckpointStore, no_folder_error
from echelon.accelerator.checkpoint.folders import has_checkpoint, newest_whole
from echelon.accelerator.checkpoint.training_state import content_of, load_content
from echelon.accelerator.models.save_objects import offloaded_state
from echelon.accelerator.models.save_sharded import write_sharded
from echelon.accelerator.models.weight_check import shortened, trained_outside_state_dict
from echelon.accelerator.rng_states import current_random_states
from echelon.accelerator.session import Session
from echelon.accelerator.state_names import Allowed
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.protocols import SupportsStateDict
from echelon.base.warnings import warn
from echelon.checkpoint import typed_json
from echelon.checkpoint.commit import place_of, require_folder_or_nothing
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.accelerate import custom_path, is_state_file, missing_files, write_state
from echelon.checkpoint.formats.dcp import open_dcp, warn_of_missing_state
from echelon.checkpoint.formats.layouts import layout_of, require_layout
from echelon.checkpoint.formats.torch_files import write_plain
from echelon.checkpoint.formats.weight_files import aliases_in, exported_to, write_shards
from echelon.checkpoint.manifest import is_part
from echelon.checkpoint.object_store import Location, ObjectPath, is_url, location
from echelon.checkpoint.read import Checkpoint, open_verified
from echelon.checkpoint.save import Content, PendingCheckpoint
from echelon.checkpoint.stored_weights import converted
from echelon.checkpoint.tensor_file import stored_form
from echelon.checkpoint.tensor_names import model_prefix
from echelon.compat.byte_sizes import convert_file_size_to_int
from echelon.config.variables import checkpoint_format
from echelon.distributed.alone import alone, is_alone
from echelon.distributed.collectives import gather_object
from echelon.distributed.control import agree, raise_on_all_ranks
from echelon.distributed.monitored_barrier import is_passed_by, monitored_barrier
from echelon.distributed.preemption import Preempted
from echelon.engines.base import ShardedState
from echelon.status.board import Phase
from echelon.status.notes import note_loaded, saving, within
from echelon.status.stop_barrier import EXIT_CODE
from echelon.world.world import World

_PREEMPTED = "preempted"  # a folder in project_dir
_logger = get_logger(__name__)


class Checkpoints:
    """A run's state on disk."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._project = session.project
        self.store = CheckpointStore(session)
        """The run's checkpoint folders."""
        self.custom_objects: list[Any] = []
        """Objects of the script that are saved and loaded in addition to the prepared ones."""
        self.write_later: Callable[[Path], None] | None = None
        """Writes further files of the checkpoints that are saved while it is set; see ``PendingCheckpoint.write_later``."""
        self._save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.data_policy = DataPolicy()
        """Default handling of changed data. The Trainer replaces this, because it counts positions differently."""
        self._is_warned_of_missing_ranks = False
        self._is_warned_of_weights_left_out = False
        self._is_warned_of_scheduler_left_out = False
        self._unwrap_model: Callable[[], Any] = lambda: None
        self._get_state_dict: Callable[[], Any] = lambda: None
        self._reads_state_itself = False  # by an overridden get_state_dict

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_unwrap_model": None, "_get_state_dict": None}

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The prepared models, whose weights are saved."""
        return tuple(self._session.objects.models)

    def use_methods(
        self,
        *,
        unwrap_model: Callable[..., nn.Module],
        get_state_dict: Callable[[nn.Module], dict[str, Any] | None],
        is_overridden: bool,
    ) -> None:
        """Unwrap and read models with these Accelerator methods (held weakly), which a subclass may override.

        Args:
            is_overridden: whether it overrides ``get_state_dict``.
        """
        self._unwrap_model, self._get_state_dict = WeakMethod(unwrap_model), WeakMethod(get_state_dict)
        self._reads_state_itself = is_overridden

    # ---- what the script registers ---

    def _chosen_format(self) -> str:
        """Return the run's checkpoint format, ``echelon`` or ``accelerate``."""
        chosen = self._project.checkpoint_format or checkpoint_format() or "echelon"
        if chosen == "transformers" and self._project.checkpoint_format is None:
            chosen = "accelerate"  # the variable is for both levels of a program
        if chosen not in ("echelon", "accelerate"):
            raise UsageError(
                f"checkpoint_format must be 'echelon' or 'accelerate', but got {chosen!r}", do="set one of them"
            )
        return chosen

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include the state of ``objects`` in checkpoints.

        Raises:
            UsageError: an object lacks ``state_dict`` or ``load_state_dict``, or its state is not plain data.

        Examples:
            >>> average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model))
            >>> accelerator.register_for_checkpointing(average)
        """
        invalid = [f"{i} ({type(o).__name__})" for i, o in enumerate(objects) if not isinstance(o, SupportsStateDict)]
        if invalid:
            raise UsageError(
                f"register_for_checkpointing: these arguments lack state_dict or load_state_dict: {', '.join(invalid)}",
                do="define both methods, or store the state in an object that has them",
            )
        require = _require_savable if self._chosen_format() == "echelon" else require_plain
        for one in objects:
            require(one)
        self.custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank when ``save_state`` writes.

        Entries that the hook removes from ``weights`` are not written; files that the hook writes into ``output_dir``
        become part of the checkpoint. The folder has a temporary name while it is written. Call ``remove()`` on the
        returned handle to remove the hook.

        Examples:
            >>> def write_tokenizer(models, weights, output_dir):
            ...     tokenizer.save_pretrained(output_dir)
            >>> handle = accelerator.register_save_state_pre_hook(write_tokenizer)
            >>> handle.remove()
        """
        return _add_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` reads.

        Entries that the hook removes from ``models`` are not loaded. Call ``remove()`` on the returned handle to remove
        the hook.

        Examples:
            >>> handle = accelerator.register_load_state_pre_hook(lambda models, input_dir: print(input_dir))
            >>> handle.remove()
        """
        return _add_hook(self._load_hooks, hook)

    # ---- saving ---

    def save_state(
        self,
        /,
        output_dir: str | os.PathLike[str] | ObjectPath | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        metric: float | None = None,
        **save_model_func_kwargs: Any,
    ) -> Location:
        """Save everything needed to resume: prepared and registered objects, RNG states, ``step``. Returns the folder.

        An error on any rank is raised on all ranks and leaves an existing checkpoint unchanged. A full or failing disk
        is reported, but ends the run only after ``max_failed_saves`` consecutive failures (docs/checkpoints.md).

        Args:
            output_dir: target folder, or a URL in an object store, such as ``s3://bucket/run/last``. A checkpoint there is
                replaced completely; other files are kept. With
                ``automatic_checkpoint_naming``, the folder is always
                ``project_dir/checkpoints/checkpoint_<iteration>``.
            safe_serialization: store weights as safetensors; False: use ``torch.save``, in Accelerate's layout.
            blocking: wait until the checkpoint is written. False: return once the state is copied, and write it in a
                background thread, which the next save waits for.
            metric: metric of this checkpoint for ``ProjectConfiguration(keep_best=...)``; rank zero's value is used.
            save_model_func_kwargs: options for engines that write checkpoints themselves; currently no engine does.

        Collective: call on every rank. If only rank zero calls it and the engine does not shard the state, it saves
        without the other ranks' RNG states and warns, as soon as it sees that they have continued.

        Raises:
            UsageError: no folder was given, the folder already exists (with automatic naming) or cannot be replaced, or
                an argument is unknown.
            CheckpointError: a state contains something that cannot be loaded without running code.
            DesyncError: some ranks failed; the message names them.

        Examples:
            >>> folder = accelerator.save_state("checkpoint")
        """
        session = self._session
        if self._is_left_to_rank_zero("save_state()"):
            if not self._is_warned_of_missing_ranks:
                self._is_warned_of_missing_ranks = True
                warn(
                    _(
                        "save_state() runs on the main process only, so the checkpoint lacks the other ranks' RNG "
                        "states, and a resumed run is not bit-identical. Call save_state() on every rank, outside `if "
                        "accelerator.is_main_process:`"
                    )
                )
            with alone():
                return self.save_state(
                    output_dir, safe_serialization, blocking=True, metric=metric, **save_model_func_kwargs
                )
        if save_model_func_kwargs:
            raise UsageError(
                f"save_state() got {', '.join(save_model_func_kwargs)}, which the {session.capabilities.name} engine "
                "does not support",
                do="remove the argument",
            )
        monitored_barrier(
            "save_state()", advice="Each rank writes its part, and rank zero also writes the shared state."
        )
        session.gradient_state.reading.metrics.check()
        if not is_alone():
            session.guard.compare_models("at save_state()")
        with saving(session.progress.step), training_weights(session):
            if self._project.automatic_checkpoint_naming:  # rank zero may have saved alone
                self._project.iteration = max(gather_object([self._project.iteration]))
            output_dir = _one_folder(output_dir, session.world, "save_state")
            if self._project.automatic_checkpoint_naming:
                target = self.store.next_folder()
            elif output_dir is None:
                raise no_folder_error("save_state", do="pass output_dir")
            else:
                target = location(output_dir)
            session.engine.update_loss_scale()
            self.warn_of_weights_left_out()
            self._warn_of_scheduler_left_out()
            if safe_serialization and self._chosen_format() == "echelon":
                pending = self._own_format(target, metric=None if metric is None else float(metric))
            elif not blocking or metric is not None:
                raise UsageError(
                    f"save_state({'metric=' if blocking else 'blocking=False'}) requires echelon's own checkpoint "
                    "format",
                    do="remove checkpoint_format='accelerate' and safe_serialization=False, or omit metric= and "
                    "blocking=False",
                )
            else:
                pending = self._accelerate_format(target, safe_serialization=safe_serialization)
            if self.store.save(pending, blocking=blocking):
                self._project.iteration += 1
            return target

    def warn_of_weights_left_out(self) -> None:
        """Warn once of trained weights that a model's own ``state_dict`` leaves out, so that no checkpoint holds them."""
        if self._is_warned_of_weights_left_out or not self._session.capabilities.exposes_state:
            return
        for model in self._bare_models():
            if names := trained_outside_state_dict(model):
                self._is_warned_of_weights_left_out = True
                warn(
                    _(
                        "{names} are trained, but {kind}.state_dict() does not return them, so checkpoints do "
                        "not hold them, and a resumed run continues without their training. Let state_dict() "
                        "return them",
                        names=shortened(names),
                        kind=type(model).__name__,
                    )
                )

    def _warn_of_scheduler_left_out(self) -> None:
        """Warn once if an optimizer has a scheduler (which sets ``initial_lr``), but none is saved."""
        objects = self._session.objects
        if (
            self._is_warned_of_scheduler_left_out
            or objects.schedulers
            or any(hasattr(one, "optimizer") for one in self.custom_objects)
        ):
            return
        for optimizer in objects.optimizers:
            if any("initial_lr" in group for group in optimizer.param_groups):
                self._is_warned_of_scheduler_left_out = True
                warn(
                    _(
                        "checkpoints do not hold the learning rate scheduler of {name}, which was not passed to prepare(), so a "
                        "resumed run continues with other learning rates. Call scheduler = accelerator.prepare(scheduler), or "
                        "accelerator.register_for_checkpointing(scheduler) for one that each process steps itself",
                        name=type(optimizer.optimizer).__name__,
                    )
                )

    def _is_left_to_rank_zero(self, operation: str) -> bool:
        """Return whether this is rank zero, the other ranks have gone on without ``operation``, and it can do without them.

        Programs written for Accelerate call it under ``if accelerator.is_main_process:``.
        """
        capabilities = self._session.capabilities
        is_whole = capabilities.exposes_state and not (
            capabilities.shards_parameters or capabilities.shards_optimizer_state
        )
        return is_whole and self._session.world.is_rank_zero and not is_alone() and is_passed_by(operation)

    def _state_to_resume(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the state dict from which training continues exactly. Collective if parameters are sharded."""
        get_state_dict: Callable[..., dict[str, Any] | None] = self._get_state_dict()
        return get_state_dict(model, master_weights=True) if self._session.masters else get_state_dict(model)

    def _own_format(self, target: Location, *, metric: float | None) -> PendingCheckpoint:
        """Return a save in echelon's own format.

        Hooks may draw random numbers and change registered objects, so the content is collected after they have run. Models whose
        weights a hook removes from the list are not written.

        Collective: call on every rank if parameters are sharded.
        """
        session, world, models = self._session, self._world, self._bare_models()
        weights = [self._state_to_resume(m) or {} for m in session.objects.models] if self._save_hooks else []
        given = list(weights)

        def run_hooks(folder: Path, is_owner: bool) -> list[int]:
            for hook in list(self._save_hooks.values()):
                hook(models, weights, str(folder))
            return [i for i, one in enumerate(given) if not any(one is kept for kept in weights)]

        def collect(removed: list[int] | None) -> Content:
            with raise_on_all_ranks("collecting the state"):
                content = content_of(
                    session,
                    models,
                    custom_objects=self.custom_objects,
                    random_states=session.update.snapshot(),
                    metric=metric,
                    world_size=world.world_size,
                )
            left_out = tuple(model_prefix(i) for i in removed or ())
            tensors = {name: tensor for name, tensor in content.tensors.items() if not name.startswith(left_out)}
            return replace(content, tensors=tensors)

        return PendingCheckpoint(
            target=target,
            world=world,
            collect=collect,
            write=run_hooks if self._save_hooks else None,
            write_later=self.write_later,
            written_by="a hook of save_state",
            is_part=_is_ours,
            on_each_node=self.store.is_on_each_node,
        )

    def _accelerate_format(self, target: Location, *, safe_serialization: bool) -> PendingCheckpoint:
        """Return a save in Accelerate's format.

        Collective: call on every rank.
        """
        session, objects, world = self._session, self._session.objects, self._world
        if objects.averages:
            raise UsageError(
                _("a checkpoint in Accelerate's format cannot hold the {average}", average=objects.averages[0]),
                where="save_state()",
                do=_("remove checkpoint_format='accelerate' and safe_serialization=False"),
            )
        models = self._bare_models()
        weights = [self._state_to_resume(model) for model in objects.models]
        state = collect_state(
            weights=weights,
            optimizers=objects.optimizers,
            schedulers=objects.schedulers,
            dataloaders=objects.loaders,
            scaler=session.update.scaler,
            step=session.update.step,
            progress={**session.progress.to_json(), "micro_step": 0},
            num_processes=world.world_size,
        )
        is_gathered = any(one is None for one in (*weights, *state.optimizers))  # only rank zero holds it
        each = self._project.save_on_each_node and not is_gathered

        def write(folder: Path, is_owner: bool) -> None:
            for hook in list(self._save_hooks.values()):
                hook(models, weights, str(folder))
            writes_shared = is_owner if each else world.is_rank_zero
            # The hooks may have drawn random numbers.
            now = replace(state, random_states=session.update.snapshot() or current_random_states())
            write_state(
                folder, now, rank=world.rank, writes_shared=writes_shared, safe_serialization=safe_serialization
            )
            if writes_shared:
                for i, one in enumerate(self.custom_objects):
                    write_plain(one.state_dict(), custom_path(folder, i))

        return PendingCheckpoint(target=target, world=world, write=write, is_part=_is_ours, on_each_node=each)

    def load_state(
        self,
        /,
        input_dir: str | os.PathLike[str] | ObjectPath | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_missing: Collection[str] = (),
        allow_changed_data: bool | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint that ``save_state``, Accelerate or torch.distributed.checkpoint wrote. No code in it is executed.

        In echelon's own format every file is verified before anything is loaded, and the checkpoint may come from a
        different engine and number of processes (docs/checkpoints.md).

        Args:
            input_dir: checkpoint folder, or its URL in an object store. None: the newest complete automatically named checkpoint; skipped ones are
                logged.
            load_kwargs: ``torch.load`` options for everything except the models, in Accelerate's layout.
            allow_missing: entries that may be missing from the checkpoint or from this run: ``"scheduler"``, ``"loader[0]"``,
                ``"model[0].head"`` (weights with this prefix), ... Only for echelon's own format.
            allow_changed_data: continue from a checkpoint in the middle of an epoch even if the number of samples, the
                batch size, or the data's order or contents changed; a warning names the position. None: use the
                configuration (``echelon launch --allow_changed_data``). By default a change raises an error in the
                middle of an epoch and a warning between two epochs.
            load_model_func_kwargs: ``map_location`` (``cpu`` or ``on_device``), and ``strict`` and other options of
                ``load_state_dict``, for the models.

        Collective: call on every rank.

        Raises:
            UsageError: the folder does not exist.
            CheckpointError: a file is missing, is damaged, contains code, or belongs to another model; or the
                checkpoint was saved in the middle of an epoch over different data.
            DesyncError: some ranks failed; the message names them.

        Examples:
            >>> folder = accelerator.save_state("checkpoint")
            >>> accelerator.load_state("checkpoint")
        """
        monitored_barrier("load_state()")
        options = {"allow_missing": allow_missing, "allow_changed_data": allow_changed_data, **load_model_func_kwargs}
        with within(Phase.LOAD):
            self._load(input_dir, load_kwargs, options)
        note_loaded(self._session.progress.step)

    def _load(self, input_dir: Any, load_kwargs: dict[str, Any] | None, options: dict[str, Any]) -> Location:
        """Load a checkpoint, and return its place."""
        session, objects = self._session, self._session.objects
        for average in objects.averages:
            average.require_not_applied("load_state()")
        self.store.wait()
        map_location = options.pop("map_location", None)
        allowed = Allowed(options.pop("allow_missing", ()), is_argument=not self.data_policy.is_of_trainer)
        given = options.pop("allow_changed_data", None)
        allows = session.config.value.allow_changed_data if given is None else given
        data = replace(self.data_policy, allows_changes=allows or self.data_policy.allows_changes)
        folder, checkpoint = self._source(_one_folder(input_dir, session.world, "load_state"))
        session.update.drop_update()
        if checkpoint is None and allowed:
            raise UsageError(
                _("allow_missing= requires a checkpoint in echelon's own format, but {folder} is not", folder=folder),
                do=_("remove allow_missing, or load a checkpoint in echelon's own format"),
            )
        with raise_on_all_ranks("load_state"):
            strict = options.pop("strict", True) if checkpoint is not None else True
            if checkpoint is None:
                require_custom_states(folder, len(self.custom_objects))
            elif options:
                raise UsageError(
                    f"load_state() got unsupported keyword arguments for echelon's checkpoint format: {', '.join(options)}",
                    do="remove them",
                )
            models = self._bare_models()
            left = list(models)
            for hook in list(self._load_hooks.values()):
                hook(left, str(folder if checkpoint is None else checkpoint.folder))
            if checkpoint is not None:
                changes = load_content(
                    session,
                    checkpoint,
                    models,
                    loaded=[model for model in models if not any(model is one for one in left)],
                    custom_objects=self.custom_objects,
                    strict=strict,
                    allowed=allowed,
                    data=data,
                )
                _logger.info("%s is loaded", self.store.origin(folder))
            else:
                changes = load_accelerator_state(
                    folder,
                    left,
                    objects.optimizers,
                    objects.schedulers,
                    objects.loaders,
                    session.world.rank,
                    session.update.scaler,
                    map_location,
                    load_kwargs,
                    data=data,
                    **options,
                )
                for i, one in enumerate(self.custom_objects):
                    load_custom_state(one, folder, i)
                for average in objects.averages:
                    average.start_anew(folder)
            session.update.step = changes.get("step", session.update.step)
            session.restore_progress(changes.get("progress"))
        origin = self.store.origin(folder)
        if input_dir is None or is_url(input_dir):  # otherwise a Trainer still reads the copy
            self.store.drop_copy()
        return origin

    def resume(
        self,
        path: str | os.PathLike[str] | ObjectPath | None = None,
        *,
        strict: bool = True,
        allow_missing: Collection[str] = (),
        must_exist: bool = False,
        allow_changed_data: bool | None = None,
    ) -> bool:
        """Resume from the newest checkpoint of an earlier start; call it after ``prepare``. Returns False if there is none.

        This loads what ``load_state`` loads. The next pass of a training loader then continues in the middle of its
        epoch if the checkpoint was saved there, evaluations start over, and ``save_state`` continues the numbering. A
        training loader is one whose last pass started with gradients enabled and a prepared model in training mode. An
        incomplete update is repeated (docs/checkpoints.md).

        Args:
            path: a folder or URL that was passed to ``save_state``. None: the newest complete automatically named checkpoint;
                skipped ones are logged.
            strict: require the checkpoint to contain exactly the model's weights.
            allow_missing: see ``load_state``.
            allow_changed_data: see ``load_state``.
            must_exist: raise an error if there is no checkpoint; otherwise the run logs this and starts from scratch.

        Collective: call on every rank.

        Raises:
            UsageError: no path was given and checkpoints are not named automatically; no checkpoint exists (with
                ``must_exist``); nothing was prepared or registered yet; or the path is a file or a broken symbolic link.
            CheckpointError: no checkpoint is complete; the checkpoint belongs to another model; or (with
                ``parity="off"``) it was saved in the middle of an epoch on a different number of processes.
            DesyncError: some ranks failed; the message names them.

        Examples:
            >>> if accelerator.resume():
            ...     accelerator.print(f"continuing at step {accelerator.progress.step}")
        """
        monitored_barrier("resume()")
        objects = self._session.objects
        if not (objects.models or objects.optimizers or objects.loaders or self.custom_objects):
            raise UsageError(
                _("resume() was called before prepare(), so there is nothing to load a checkpoint into"),
                do=_("call prepare() first, then resume()"),
            )
        preemption = self._session.preemption
        if not preemption.is_driven:
            # Make it absolute now, because the script may change its working directory before a preemption saves there.
            preemption.folder = None if path is None else _absolute(location(path))
            preemption.join()
        options = {"strict": strict, "allow_missing": allow_missing, "allow_changed_data": allow_changed_data}
        with within(Phase.LOAD):
            is_there = self._resume(path, must_exist=must_exist, options=options)
        if is_there:
            note_loaded(self._session.progress.step)
        return is_there

    def _resume(self, path: Any, *, must_exist: bool, options: dict[str, Any]) -> bool:
        is_named = self._project.automatic_checkpoint_naming
        if path is None and not is_named:
            raise no_folder_error("resume", do="pass the folder that save_state() uses")
        self.store.wait()
        folder = _one_folder(path, self._session.world, "resume")
        with raise_on_all_ranks("resume"):
            found = self.store.numbered() if is_named else []
            if folder is None:
                place = self.store.folder()
                require_folder_or_nothing(place)
                is_there = bool(found)
            else:
                place = _absolute(location(folder))
                is_there = has_checkpoint(place)
        if not agree(is_there):
            if must_exist:
                raise UsageError(
                    f"no checkpoint found in {place}",
                    where="resume(must_exist=True)",
                    do="check the path, or remove must_exist to start from scratch",
                )
            # A warning is visible by default, for users who meant another folder.
            _logger.warning(N_("no checkpoint in %s: starting from scratch"), place)
            return False
        place = self._load(folder, None, options)
        for loader in self._session.objects.loaders:
            loader.leave_pass()  # unlike load_state(), this continues at the saved position in any case
        with raise_on_all_ranks("resume"):
            position = self._session.epochs.saved_position()
            epoch = self._session.resume_epochs()
        if not self.data_policy.is_of_trainer:  # a warning, because only these are visible by default
            _logger.warning(
                N_("resuming from %s: step %d, epoch %d%s"), place, self._session.progress.step, epoch, position
            )
        if is_named:  # incomplete checkpoints that were skipped also occupy a number
            last = max(int(one.name.removeprefix(PREFIX)) for one in found) if found else -1
            self._project.iteration = max(gather_object([last])) + 1
        return True

    # ---- echelon's own format ----------------------------------------------------------------------------------------

    def _source(self, input_dir: Any) -> tuple[Path, Checkpoint | None]:
        """Return the folder to load and, for echelon's own format and DCP's, the verified checkpoint.

        Collective: call on every rank.
        """
        world = self._session.world
        if input_dir is not None:
            place = _absolute(location(input_dir))
            folder = self.store.fetch(place) if isinstance(place, ObjectPath) else place
        elif not self._project.automatic_checkpoint_naming:
            raise no_folder_error("load_state", do="pass input_dir")
        else:
            found = self._newest()
            if layout_of(found) == "echelon":
                return place_of(found), Checkpoint(found)
            folder = found
        if agree(layout_of(folder) == "echelon"):
            return folder, open_verified(folder, world=world)
        with raise_on_all_ranks("load_state"):
            if require_layout(folder) != "sharded":
                return place_of(folder), None
            checkpoint = open_dcp(folder)
            if problems := checkpoint.problems():
                raise damaged("; ".join(problems[:3]))
        warn_of_missing_state(checkpoint)
        return checkpoint.local_folder, checkpoint

    def _newest(self) -> Path:
        """Return the newest complete numbered checkpoint; warn about newer incomplete ones. Collective."""
        session, objects = self._session, self._session.objects

        def lacks(path: Path) -> str | None:
            if layout_of(path) in ("echelon", "sharded"):
                return None
            place = place_of(path)
            missing = missing_files(
                place,
                num_models=0 if self._load_hooks else len(objects.models),
                num_optimizers=len(objects.optimizers),
                num_schedulers=len(objects.schedulers),
                has_scaler=session.update.scaler is not None,
            )
            return f"{place} lacks {', '.join(missing)}" if missing else None

        found, passed_over = newest_whole(
            session.world, self.store.folder(), prefix=PREFIX, usable=lacks, fetch=self.store.fetch
        )
        skipped = "\n".join(f"    {path.name}: {why}" for path, why in passed_over)
        if found is None and not skipped:
            raise UsageError(
                _("{folder} holds no checkpoint", folder=self.store.folder()),
                do=_("pass the folder of a checkpoint, or save a checkpoint first"),
            )
        if found is None:
            raise CheckpointError(
                _("{folder} contains no complete checkpoint\n{skipped}", folder=self.store.folder(), skipped=skipped),
                do=_("pass the folder of another checkpoint; to start over, set another project_dir"),
            )
        if skipped:
            text = N_("loading {found}; newer checkpoints are incomplete and were skipped:\n{skipped}")
            warn(_(text, found=found, skipped=skipped))
        return found

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        save_dtype: str | torch.dtype | None = None,
    ) -> None:
        """Write the weights of ``model`` to a folder under plain parameter names, for use by other programs.

        If parameters are sharded, the ranks that can see the folder (or all, to an object store) write different files at the same
        time, and no rank gathers the whole model.

        Args:
            model: prepared or not.
            save_directory: created if missing, or a URL in an object store; other files in it are kept.
            max_shard_size: maximum file size, such as ``"5GB"``; if there are several files, an index is written.
            safe_serialization: use the safetensors format; False: use ``torch.save``, for which rank zero gathers the model.
            save_dtype: dtype of the floating-point weights in the files, such as ``"bfloat16"``. None: the dtype in which they
                were loaded.

        Collective: call on every rank. If the engine does not shard the state, rank zero may call it alone.

        Examples:
            >>> accelerator.save_model(model, "exported", max_shard_size="5GB")
        """
        if self._is_left_to_rank_zero("save_model()"):
            with alone():
                self.save_model(model, save_directory, max_shard_size, safe_serialization, save_dtype=save_dtype)
            return
        monitored_barrier("save_model()", advice="Rank zero writes.")
        if not is_alone():
            self._session.guard.compare_models("at save_model()")
        place, max_bytes = location(save_directory), convert_file_size_to_int(max_shard_size)
        from echelon.big_models.module_sizes import as_dtype  # noqa: PLC0415 - most programs never need it

        dtype = None if save_dtype is None else as_dtype(save_dtype)
        with within(Phase.SAVE), exported_to(place) as folder:
            sharded = self.sharded_state(model) if safe_serialization else None
            if sharded is not None and self.write_sharded(
                sharded, model, place, max_shard_bytes=max_bytes, dtype=dtype
            ):
                return
            state = offloaded_state(model) or self._get_state_dict()(model)
            with raise_on_all_ranks("save_model"):
                if folder.is_file():
                    raise UsageError(f"{folder} exists and is not a directory", do="pass another save_directory")
                on_meta = [name for name, tensor in (state or {}).items() if getattr(tensor, "is_meta", False)]
                if on_meta:
                    raise UsageError(
                        f"the model has no values on this process, because {', '.join(on_meta[:3])} are on the meta device",
                        do="load the weights before saving",
                    )
                world, each = self._session.world, self._project.save_on_each_node
                # The state of a sharded model is None on all ranks but rank zero.
                if state is not None and (world.is_local_rank_zero if each else world.is_rank_zero):
                    state = state if dtype is None else _cast(state, dtype)
                    write_shards(state, folder, max_shard_bytes=max_bytes, safe_serialization=safe_serialization)

    def sharded_state(self, model: nn.Module, *, is_wanted: bool = True) -> ShardedState | None:
        """Return a model's state dict with tensors that are still sharded, or None on all ranks if it must be gathered.

        Args:
            is_wanted: False on any rank: return None on all.

        Collective: call on every rank if parameters are sharded.
        """
        session = self._session
        if not session.capabilities.shards_parameters or self._project.save_on_each_node or self._reads_state_itself:
            return None
        state = session.engine.sharded_state(session.objects.engine_model(model))
        return None if agree(state is None or not is_wanted) else state

    def write_sharded(
        self,
        state: ShardedState,
        model: nn.Module,
        folder: Location,
        *,
        max_shard_bytes: int,
        dtype: torch.dtype | None = None,
    ) -> bool:
        """Write ``state`` of ``model`` to safetensors files in ``folder``; return False if it must be gathered instead.

        Args:
            dtype: dtype of the floating-point weights. None: those in which they were loaded.

        Collective: call on every rank.
        """
        session = self._session
        with raise_on_all_ranks("save_model"):
            if isinstance(folder, Path) and folder.is_file():
                raise UsageError(f"{folder} exists and is not a directory", do="pass another save_directory")
        loaded = session.masters.loaded_dtypes(self._unwrap_model()(model, keep_torch_compile=False))

        def dtype_of(name: str, own: torch.dtype) -> torch.dtype:
            return loaded.get(name, own) if dtype is None or not own.is_floating_point else dtype

        return write_sharded(state, folder, rank=session.world.rank, max_shard_bytes=max_shard_bytes, dtype_of=dtype_of)

    def gather_tensors(
        self, state: ShardedState, model: nn.Module, names: Collection[str]
    ) -> dict[str, torch.Tensor | None] | None:
        """Return some tensors of ``state`` on rank zero, in the dtypes in which they were loaded, and None for each on other ranks.

        Return None if rank zero does not hold a part of each, because ``model`` is a pipeline.

        Collective: call on every rank, with the same ``names``.
        """
        if agree(state.part != 0):
            return None
        loaded = self._session.masters.loaded_dtypes(self._unwrap_model()(model, keep_torch_compile=False))
        found: dict[str, torch.Tensor | None] = {}
        for first in dict.fromkeys(state.aliases.get(name, name) for name in state.names if name in names):
            full = state.tensors[first].gather(0)
            found[first] = None if full is None else full.to(loaded.get(first, full.dtype))
        return {name: found[state.aliases.get(name, name)] for name in state.names if name in names}

    def pass_was_over(self, folder: Path, loader: Any) -> bool:
        """Return whether ``loader`` had yielded its last batch when ``folder`` was saved in echelon's own format."""
        states = Checkpoint(folder).objects()["orders"]
        found = [i for i, one in enumerate(self._session.objects.loaders) if one is loader]
        record = states[found[0]].get("pass") if found and found[0] < len(states) else None
        return record is not None and not record["is_within"]

    @contextmanager
    def use_data_policy(self, policy: DataPolicy) -> Iterator[None]:
        """Apply ``policy`` to checkpoints that are loaded inside the block."""
        before, self.data_policy = self.data_policy, policy
        try:
            yield
        finally:
            self.data_policy = before

    def save_and_end(self, save_state: Callable[[Any], Location]) -> NoReturn:
        """Save a checkpoint for ``resume``, if a folder is known, and end the run.

        Collective: call on every rank.

        Raises:
            Preempted: always raised, unless too many saves have failed.
        """
        project, step = self._project, self._session.progress.step
        folder = self._session.preemption.folder
        if folder is None and project.project_dir is not None:
            folder = location(os.fspath(project.project_dir)) / _PREEMPTED
        if project.automatic_checkpoint_naming and project.project_dir is not None:
            folder = None
        elif folder is None:
            _logger.warning(
                N_(
                    "termination signal received: the run ends after step %d with exit code %d without saving; set "
                    "Accelerator(project_dir=...) or call resume(folder) to save next time"
                ),
                step,
                EXIT_CODE,
            )
            raise Preempted
        place = save_state(folder)
        if self.store.is_saved:
            argument = "" if folder is None else repr(str(folder))
            outcome = _("saved {place}; resume({argument}) continues from it", place=place, argument=argument)
        else:  # the reason was logged
            outcome = _(
                "{place} could not be written, so the next start continues from the previous checkpoint", place=place
            )
        self.store.close()
        _logger.warning(
            N_("termination signal received: the run ends after step %d with exit code %d; %s"),
            step,
            EXIT_CODE,
            outcome,
        )
        raise Preempted

    @property
    def _world(self) -> World:
        """The ranks that save together."""
        world = self._session.world
        return replace(world, world_size=1, local_world_size=1) if is_alone() else world

    def _bare_models(self) -> list[nn.Module]:
        """Return the unwrapped models, which hooks receive, as in Accelerate."""
        return [self._unwrap_model()(model, keep_torch_compile=False) for model in self._session.objects.models]


@contextmanager
def training_weights(session: Session) -> Iterator[None]:
    """Return a context in which the models have the weights of training, also where averages are applied."""
    with ExitStack() as stack:
        for average in session.objects.averages:
            stack.enter_context(average.training_parameters())
        yield


def _add_hook(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _require_savable(one: Any) -> None:
    """Raise if the state of ``one`` is not plain data."""
    try:
        typed_json.encode(one.state_dict(), name=f"the state of {type(one).__name__}", put_tensor=lambda *_: None)
    except CheckpointError as error:
        raise UsageError(
            error.what, where="register_for_checkpointing", do=f"in its state_dict(), {error.do}"
        ) from error


def _cast(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return ``state`` with its floating-point tensors cast to ``dtype``; tied weights stay tied.

    Raises:
        CheckpointError: a value is too large for ``dtype``.
    """
    aliases = aliases_in(state)
    kind, _shape = stored_form(str(dtype).removeprefix("torch."), ())
    cast = {
        name: converted(value, name, kind) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in state.items()
        if name not in aliases
    }
    return {name: cast[aliases.get(name, name)] for name in state}


def _is_ours(name: str) -> bool:
    """Return whether the file ``name`` belongs to a checkpoint of any format."""
    return is_part(name) or is_state_file(name)


def _absolute(place: Location) -> Location:
    return place if isinstance(place, ObjectPath) else place.absolute()


def _one_folder(given: Any, world: World, operation: str) -> Any:
    """Return the folder that this machine's first rank passed; names that contain the time may differ between ranks.

    Collective: call on every rank.
    """
    text = str(given) if isinstance(given, ObjectPath) else None if given is None else os.fspath(given)
    named = gather_object([(world.node_rank, text)])
    first: dict[int, str | None] = {}
    for node_rank, folder in named:
        first.setdefault(node_rank, folder)
    others = [rank for rank, (node_rank, folder) in enumerate(named) if folder != first[node_rank]]
    if others:
        warn(
            _(
                "{operation}() got a different folder on ranks {others} than on the first rank of their machine. All "
                "ranks must share one checkpoint folder; these ranks use {first}.",
                operation=operation,
                others=", ".join(map(str, others)),
                first=first[named[others[0]][0]],
            )
        )
    return first[world.node_rank]
