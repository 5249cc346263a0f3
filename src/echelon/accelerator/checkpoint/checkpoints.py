"""Saving and loading the state of an Accelerator: where it goes, its hooks, what is registered, how many are kept."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakMethod

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
from echelon.accelerator.checkpoint.checkpoint_store import PREFIX, CheckpointStore
from echelon.accelerator.checkpoint.folders import has_checkpoint, newest_whole
from echelon.accelerator.checkpoint.state_names import Allowed
from echelon.accelerator.checkpoint.training_state import content_of, load_content
from echelon.accelerator.models.model_sizes import convert_file_size_to_int
from echelon.accelerator.session import Session
from echelon.base import environ
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsStateDict
from echelon.base.warnings import warn
from echelon.checkpoint import typed_json
from echelon.checkpoint.commit import place_of, require_folder_or_nothing
from echelon.checkpoint.formats.accelerate import custom_path, is_state_file, missing_files, write_state
from echelon.checkpoint.formats.layouts import layout_of, require_layout
from echelon.checkpoint.formats.torch_files import write_plain
from echelon.checkpoint.formats.weight_files import write_shards
from echelon.checkpoint.manifest import is_part
from echelon.checkpoint.read import Checkpoint, open_verified
from echelon.checkpoint.save import Save, SaveFailedError, as_save_failure, begin_save, run_on_all_ranks, save_folder
from echelon.checkpoint.storage import LocalStorage
from echelon.checkpoint.tensor_names import model_prefix
from echelon.distributed.collectives import gather_object
from echelon.distributed.control import agree, raise_on_all_ranks
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.distributed.preemption import Preempted
from echelon.distributed.small_messages import gather_bytes
from echelon.status.board import Phase
from echelon.status.notes import note_loaded, saving, within
from echelon.status.stop_barrier import EXIT_CODE
from echelon.world.world import World

__all__ = ["Checkpoints"]

_PREEMPTED = "preempted"  # a folder in project_dir
_logger = get_logger(__name__)


class Checkpoints:
    """The state of one run on disk."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._project = session.project
        self.store = CheckpointStore(session)
        """Its folders."""
        self.custom_objects: list[Any] = []
        """Saved and loaded beside what was prepared."""
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.data_policy = DataPolicy()
        """What changed data mean, unless a call says that they are allowed; the Trainer knows places of its own."""
        self._unwrap_model: Callable[[], Any] = lambda: None
        self._get_state_dict: Callable[[], Any] = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_unwrap_model": None, "_get_state_dict": None}

    def use_methods(
        self, *, unwrap_model: Callable[..., nn.Module], get_state_dict: Callable[[nn.Module], dict[str, Any] | None]
    ) -> None:
        """Read models by bound methods of the Accelerator, which a subclass may override. They are held weakly."""
        self._unwrap_model, self._get_state_dict = WeakMethod(unwrap_model), WeakMethod(get_state_dict)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of ``objects``, too.

        Raises:
            UsageError: one has no ``state_dict`` and ``load_state_dict``, or holds what is no plain data.
        """
        invalid = [f"{i} ({type(o).__name__})" for i, o in enumerate(objects) if not isinstance(o, SupportsStateDict)]
        if invalid:
            raise UsageError(
                f"register_for_checkpointing: argument {', '.join(invalid)} has no state_dict and load_state_dict",
                do="give it both, or store what it holds in an object that has them",
            )
        for one in objects:
            if self._chosen_format() == "echelon":
                _require_savable(one)
            else:
                require_plain(one)
        self.custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank when ``save_state`` writes.

        What it takes out of ``weights`` is not written; what it writes into ``output_dir`` becomes a part of the
        checkpoint. The folder has another name while it is written. ``handle.remove()`` of the result removes the hook.
        """
        return _add_hook(self.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` reads.

        What it takes out of ``models`` is not loaded. ``handle.remove()`` of the result removes the hook.
        """
        return _add_hook(self.load_hooks, hook)

    def save_state(
        self,
        /,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        metric: float | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Write everything that resuming needs: what was prepared or registered, random states, ``step``. Returns where.

        An error on any rank is raised on all, and leaves what was there before as it was. A disk that is full, or fails,
        is reported, and does not end the run until ``max_failed_saves`` in a row (docs/checkpoints.md).

        Args:
            output_dir: a folder. An older state in it is replaced whole; other files stay. With
                ``automatic_checkpoint_naming`` it is ``project_dir/checkpoints/checkpoint_<iteration>`` instead.
            safe_serialization: weights as safetensors; False: by ``torch.save``, in Accelerate's layout.
            blocking: False: return when the state is copied, and write it in a thread; the next save waits for it.
            metric: how good the state is, for ``ProjectConfiguration(keep_best=)``; rank zero's counts.
            save_model_func_kwargs: of engines that write by themselves; none of this version does.

        Collective: every rank.

        Raises:
            UsageError: no folder, one that is there already (numbered) or cannot be replaced, or an unknown argument.
            CheckpointError: a state holds what could not be loaded without running code.
            DesyncError: some ranks failed; they are named.
        """
        session = self._session
        if save_model_func_kwargs:
            raise UsageError(
                f"save_state() was given {', '.join(save_model_func_kwargs)}, which the engine "
                f"{session.capabilities.name} does not know",
                do="leave it out",
            )
        monitored_barrier("save_state()", advice="Each rank writes its part; rank zero what is one for all.")
        session.gradient_state.reading.metrics.check()
        with saving(session.progress.step):
            target = self.store.next_folder(_one_folder(output_dir, session.world, "save_state"))
            session.engine.update_loss_scale()
            if safe_serialization and self._chosen_format() == "echelon":
                metric = None if metric is None else float(metric)
                return self._save_own(target, blocking=blocking, metric=metric)
            if not blocking or metric is not None:
                raise UsageError(
                    f"save_state({'metric=' if blocking else 'blocking=False'}) needs echelon's own checkpoint format",
                    do="leave out checkpoint_format='accelerate' and safe_serialization=False, or that argument",
                )
            return self._save_as_accelerate(target, safe_serialization=safe_serialization)

    def _save_as_accelerate(self, target: Path, *, safe_serialization: bool) -> Path:
        session, objects, world = self._session, self._session.objects, self._session.world
        self.store.wait()
        models = self._bare_models()
        weights = [self._get_state_dict()(model) for model in objects.models]
        random_states = session.update.snapshot()
        state = collect_state(
            weights=weights,
            optimizers=objects.optimizers,
            schedulers=objects.schedulers,
            dataloaders=objects.loaders,
            scaler=session.update.scaler,
            step=session.update.step,
            progress={**session.progress.to_json(), "micro_step": 0},
            random_states=random_states,
        )
        is_gathered = any(one is None for one in (*weights, *state.optimizers))  # on rank zero alone
        each = self._project.save_on_each_node and not is_gathered

        def write(folder: Path, is_owner: bool) -> None:
            for hook in list(self.save_hooks.values()):
                hook(models, weights, str(folder))
            writes_shared = is_owner if each else world.is_rank_zero
            write_state(
                folder, state, rank=world.rank, writes_shared=writes_shared, safe_serialization=safe_serialization
            )
            if writes_shared:
                for i, one in enumerate(self.custom_objects):
                    write_plain(one.state_dict(), custom_path(folder, i))

        def save() -> None:
            is_first = world.is_rank_zero or (each and world.is_local_rank_zero)
            self.store.lock_numbered(target, is_first=is_first, is_foreign=True)
            is_owner = save_folder(target, write, world=world, is_part=_is_ours, fence=self.store.fence)
            # Together: who has returned sees the folder as it stays.
            run_on_all_ranks("deleting old checkpoints", lambda: self.store.rotate(target, is_owner), gather_bytes)

        if self.store.count_failures(save):
            self._project.iteration += 1
        return target

    def load_state(
        self,
        /,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_missing: Collection[str] = (),
        allow_changed_data: bool | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what ``save_state`` wrote, here or in Accelerate. No code of the files runs.

        In echelon's own format every file is verified before anything is loaded, and the checkpoint may be of another
        engine and another number of processes (docs/checkpoints.md).

        Args:
            input_dir: the folder; None: of the automatically named ones the newest that is whole; what was passed over is told.
            load_kwargs: of ``torch.load``, for everything but the models; in Accelerate's layout.
            allow_missing: pieces that the checkpoint and this run need not both have: ``"scheduler"``, ``"loader[0]"``,
                ``"model[0].head"`` (weights whose names begin so), ... In echelon's own format.
            allow_changed_data: a checkpoint of the middle of an epoch is gone on with although the number of samples, the batch
                size, the order or the contents of the data are others now; from where is told. None: as the configuration
                says (``echelon launch --allow_changed_data``), else such a change is an error. Between two epochs it is told.
            load_model_func_kwargs: ``map_location`` (``cpu`` or ``on_device``), and ``strict`` and others of
                ``load_state_dict``, for the models.

        Collective: every rank.

        Raises:
            UsageError: there is no such folder.
            CheckpointError: a file is missing, damaged, holds code, or is another model's; it is of the middle of an epoch
                over other data.
            DesyncError: some ranks failed; they are named.
        """
        monitored_barrier("load_state()")
        options = {"allow_missing": allow_missing, "allow_changed_data": allow_changed_data, **load_model_func_kwargs}
        with within(Phase.LOAD):
            self._load(input_dir, load_kwargs, options)
        note_loaded(self._session.progress.step)

    def _load(self, input_dir: Any, load_kwargs: dict[str, Any] | None, options: dict[str, Any]) -> None:
        session, objects = self._session, self._session.objects
        session.engine.update_loss_scale()
        self.store.wait()
        map_location = options.pop("map_location", None)
        allowed = Allowed(options.pop("allow_missing", ()))
        given = options.pop("allow_changed_data", None)
        allows = session.config.value.allow_changed_data if given is None else given
        data = replace(self.data_policy, allows_changes=allows or self.data_policy.allows_changes)
        input_dir = _one_folder(input_dir, session.world, "load_state")
        folder, checkpoint = self._source(input_dir)
        if checkpoint is not None:
            with raise_on_all_ranks("load_state"):
                strict = options.pop("strict", True)
                self._load_own(checkpoint, strict=strict, allowed=allowed, data=data, others=options)
            return
        if allowed:
            raise UsageError(
                "load_state(allow_missing=) needs echelon's own checkpoint format, and this is none",
                do="leave it out, or load a checkpoint of echelon",
            )
        with raise_on_all_ranks("load_state"):
            require_custom_states(folder, len(self.custom_objects))
            models = self._bare_models()
            for hook in list(self.load_hooks.values()):
                hook(models, str(folder))
            changes = load_accelerator_state(
                folder,
                models,
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
            session.update.step = changes.get("step", session.update.step)
            session.restore_progress(changes.get("progress"))
            for i, one in enumerate(self.custom_objects):
                load_custom_state(one, folder, i)

    def resume(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        allow_missing: Collection[str] = (),
        must_exist: bool = False,
        allow_changed_data: bool | None = None,
    ) -> bool:
        """Go on where an earlier start of the run has saved; call it after ``prepare``. False: nothing is there to go on with.

        What ``load_state`` loads, and then: the next pass of a training loader begins in the middle of its epoch where
        the checkpoint is of that, evaluations begin at their beginning, and ``save_state`` numbers on. A training loader
        is one whose last pass began with gradients on and a prepared model in training mode. Half an update is made again
        (docs/checkpoints.md, "Going on").

        Args:
            path: a folder that ``save_state`` was given; None: of the automatically named ones the newest that is whole,
                and what was passed over is told.
            strict: a model has every weight of the checkpoint, and the other way round.
            allow_missing: as of ``load_state``.
            allow_changed_data: as of ``load_state``.
            must_exist: a run that finds no checkpoint ends with an error; else it starts from scratch, which is logged.

        Collective: every rank.

        Raises:
            UsageError: no path, and checkpoints are not named automatically; with ``must_exist``, nothing was saved; the path
                is a file, or a symbolic link that leads nowhere.
            CheckpointError: there are checkpoints and none is whole, it is another model's, or (``parity="off"``) of the
                middle of an epoch on another number of processes.
            DesyncError: some ranks failed; they are named.
        """
        monitored_barrier("resume()")
        preemption = self._session.preemption
        if not preemption.is_driven:
            # Absolute now: the script may change its working directory before it is asked to save there.
            preemption.folder = None if path is None else Path(path).expanduser().absolute()
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
            raise UsageError(
                "resume() was given no folder",
                do="give it the folder that save_state is given, or use ProjectConfiguration(automatic_checkpoint_naming=True)",
            )
        self.store.wait()
        folder = _one_folder(path, self._session.world, "resume")
        with raise_on_all_ranks("resume"):
            found = self.store.numbered() if is_named else []
            if folder is None:
                place = self.store.folder()
                require_folder_or_nothing(LocalStorage(), place)
                is_there = bool(found)
            else:
                place = Path(folder).expanduser().absolute()
                is_there = has_checkpoint(place)
        if not agree(is_there):
            if must_exist:
                raise UsageError(
                    f"there is no checkpoint in {place}",
                    where="resume(must_exist=True)",
                    do="check the path; without must_exist a run that finds nothing starts from scratch",
                )
            # At the level that is seen by default: who meant another folder must notice.
            _logger.warning("no checkpoint in %s: starting from scratch", place)
            return False
        self._load(folder, None, options)
        with raise_on_all_ranks("resume"):
            self._session.resume_epochs()
        if is_named:  # also those that were passed over have a number
            last = max(int(one.name.removeprefix(PREFIX)) for one in found) if found else -1
            self._project.iteration = max(gather_object([last])) + 1
        return True

    # ---- echelon's own format ----------------------------------------------------------------------------------------

    def _chosen_format(self) -> str:
        chosen = self._project.checkpoint_format or environ.get("ECHELON_CHECKPOINT_FORMAT") or "echelon"
        if chosen not in ("echelon", "accelerate"):
            raise UsageError(
                f"checkpoint_format={chosen!r} is not one of 'echelon', 'accelerate'", do="give one of them"
            )
        return chosen

    def _save_own(self, target: Path, *, blocking: bool, metric: float | None) -> Path:
        session, world = self._session, self._session.world
        self.store.wait()
        is_first = self.store.saves
        models = self._bare_models()
        random_states = session.update.snapshot()
        with raise_on_all_ranks("collecting the state"):
            content = content_of(
                session, models, custom_objects=self.custom_objects, random_states=random_states, metric=metric
            )
        try:
            self.store.lock_numbered(target, is_first=is_first, is_foreign=False)
            save = begin_save(
                target,
                content,
                world=world,
                is_part=_is_ours,
                fence=self.store.fence,
                on_each_node=self.store.is_on_each_node,
            )
            if self.save_hooks:
                self._run_save_hooks(models, save)
            if blocking:
                save.finish()
                self.store.failures.succeeded()
                self.store.rotate(target, is_first)
            else:
                self.store.background.start(save, afterwards=lambda folder: self.store.rotate(folder, is_first))
        except SaveFailedError as error:
            self.store.failures.failed(error)
            return target
        self._project.iteration += 1
        return target

    def _run_save_hooks(self, models: list[nn.Module], save: Save) -> None:
        """Let the hooks write files of their own; models whose weights they take out of the list are not written.

        Collective: where parameters are sharded.
        """
        weights = [self._get_state_dict()(model) or {} for model in self._session.objects.models]
        given = list(weights)

        def run() -> list[int]:
            for hook in list(self.save_hooks.values()):
                hook(models, weights, str(save.folder))
            return [i for i, one in enumerate(given) if not any(one is kept for kept in weights)]

        try:
            taken_out = run_on_all_ranks("a hook of save_state", as_save_failure(run, save.target), gather_bytes)
        except BaseException:
            save.give_up()
            raise
        for i in taken_out[save.crew[0]]:  # the rank that makes the folder a checkpoint says it for all
            save.leave_out(model_prefix(i))

    def _source(self, input_dir: Any) -> tuple[Path, Checkpoint | None]:
        """Return what to load: where it is, and, of echelon's own format, the verified checkpoint.

        Collective: every rank.
        """
        storage, world = LocalStorage(), self._session.world
        if input_dir is not None:
            folder = Path(input_dir).expanduser().absolute()
        elif not self._project.automatic_checkpoint_naming:
            raise UsageError(
                "load_state() was given no folder",
                do="give input_dir, or use ProjectConfiguration(automatic_checkpoint_naming=True)",
            )
        else:
            found = self._newest()
            return place_of(storage, found), Checkpoint(found) if layout_of(found) == "echelon" else None
        if agree(layout_of(folder) == "echelon"):
            return folder, open_verified(folder, world=world)
        with raise_on_all_ranks("load_state"):
            require_layout(folder)
        return place_of(storage, folder), None

    def _newest(self) -> Path:
        """Return the newest of the numbered checkpoints that is whole; what is passed over is told. Collective."""
        session, objects = self._session, self._session.objects

        def lacks(path: Path) -> str | None:
            if layout_of(path) == "echelon":
                return None
            place = place_of(LocalStorage(), path)
            missing = missing_files(
                place,
                num_models=0 if self.load_hooks else len(objects.models),
                num_optimizers=len(objects.optimizers),
                num_schedulers=len(objects.schedulers),
                has_scaler=session.update.scaler is not None,
            )
            return f"{place} has no {', '.join(missing)}" if missing else None

        found, passed_over = newest_whole(session.world, self.store.folder(), prefix=PREFIX, usable=lacks)
        skipped = "\n".join(f"    {path.name}: {why}" for path, why in passed_over)
        if found is None and not skipped:
            raise UsageError(f"{self.store.folder()} holds no checkpoint", do="give input_dir, or save one first")
        if found is None:
            raise CheckpointError(
                f"{self.store.folder()} holds no whole checkpoint\n{skipped}",
                do="load one from elsewhere; to start from scratch, give another project_dir",
            )
        if skipped:
            warn(f"{found} is loaded; newer ones are not whole and were passed over:\n{skipped}")
        return found

    def _load_own(
        self,
        checkpoint: Checkpoint,
        *,
        strict: bool,
        allowed: Allowed,
        data: DataPolicy,
        others: dict[str, Any],
    ) -> None:
        if others:
            raise UsageError(
                f"load_state() was given {', '.join(others)}, which a checkpoint of echelon's own format does not need",
                do="leave it out",
            )
        models = self._bare_models()
        left = list(models)
        for hook in list(self.load_hooks.values()):
            hook(left, str(checkpoint.folder))
        changes = load_content(
            self._session,
            checkpoint,
            models,
            loaded=[model for model in models if not any(model is one for one in left)],
            custom_objects=self.custom_objects,
            strict=strict,
            allowed=allowed,
            data=data,
        )
        self._session.update.step = changes["step"]
        self._session.restore_progress(changes["progress"])
        _logger.info("%s is loaded", checkpoint.folder)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of ``model`` into a folder, by plain parameter names, for other programs.

        Args:
            model: prepared or not.
            save_directory: it is made where it is missing; what else is in it stays.
            max_shard_size: of one file, such as ``"5GB"``; an index is written where there are several.
            safe_serialization: safetensors; False: by ``torch.save``.

        Collective: every rank.
        """
        monitored_barrier("save_model()", advice="Rank zero writes.")
        folder = Path(save_directory).expanduser()
        with within(Phase.SAVE):
            self._write_model(self._get_state_dict()(model), folder, max_shard_size, safe_serialization)

    def _write_model(
        self, state: dict[str, Any] | None, folder: Path, max_shard_size: int | str, safe_serialization: bool
    ) -> None:
        with raise_on_all_ranks("save_model"):
            if folder.is_file():
                raise UsageError(f"{folder} exists and is not a directory", do="give another name")
            if state is None:  # sharded: rank zero has it
                return
            on_meta = [name for name, tensor in state.items() if getattr(tensor, "is_meta", False)]
            if on_meta:
                raise UsageError(
                    f"the model has no values on this process: {', '.join(on_meta[:3])} are on the meta device",
                    do="load its weights first",
                )
            world, each = self._session.world, self._project.save_on_each_node
            if world.is_local_rank_zero if each else world.is_rank_zero:
                max_bytes = convert_file_size_to_int(max_shard_size)
                write_shards(state, folder, max_shard_bytes=max_bytes, safe_serialization=safe_serialization)

    def pass_was_over(self, folder: Path, loader: Any) -> bool:
        """Tell whether ``loader`` had given its last batch when ``folder``, of echelon's own format, was saved."""
        states = Checkpoint(folder).objects()["orders"]
        found = [i for i, one in enumerate(self._session.objects.loaders) if one is loader]
        record = states[found[0]].get("pass") if found and found[0] < len(states) else None
        return record is not None and not record["is_within"]

    @contextmanager
    def data_may(self, policy: DataPolicy) -> Iterator[None]:
        """Let a change of the data mean what ``policy`` says, for what is loaded in the block."""
        before, self.data_policy = self.data_policy, policy
        try:
            yield
        finally:
            self.data_policy = before

    def save_and_end(self, save_state: Callable[[Any], Path]) -> NoReturn:
        """Save what ``resume`` continues from, where there is a folder for it, and end the run.

        Collective: every rank.

        Raises:
            Preempted: always, unless the disk refused too many checkpoints.
        """
        project, step = self._project, self._session.progress.step
        folder = self._session.preemption.folder
        if folder is None and project.project_dir is not None:
            folder = Path(os.fspath(project.project_dir)) / _PREEMPTED
        if project.automatic_checkpoint_naming and project.project_dir is not None:
            folder = None
        elif folder is None:
            _logger.warning(
                "asked to end by a signal: the run ends after step %d with exit code %d, and nothing is saved: use "
                "Accelerator(project_dir=...), or resume(folder)",
                step,
                EXIT_CODE,
            )
            raise Preempted
        place = save_state(folder)
        if self.store.is_saved:
            how = f"saved in {place}, from where resume({'' if folder is None else repr(str(folder))}) goes on"
        else:  # the reason was logged
            how = f"{place} could not be written: the next start goes on from the checkpoint before"
        self.store.close()
        _logger.warning(
            "asked to end by a signal: the run ends after step %d with exit code %d; %s", step, EXIT_CODE, how
        )
        raise Preempted

    def _bare_models(self) -> list[nn.Module]:
        """Return the user's own models: those that Accelerate gives to hooks, which call methods of theirs."""
        return [self._unwrap_model()(model, keep_torch_compile=False) for model in self._session.objects.models]


def _add_hook(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _require_savable(one: Any) -> None:
    """Raise when the state of ``one`` is no plain data.

    Raises:
        UsageError: what it holds is named.
    """
    try:
        typed_json.encode(one.state_dict(), name=f"the state of {type(one).__name__}", put_tensor=lambda *_: None)
    except CheckpointError as error:
        raise UsageError(
            error.what, where="register_for_checkpointing", do=f"in its state_dict(), {error.do}"
        ) from error


def _is_ours(name: str) -> bool:
    """Does a file in a checkpoint belong to it, in whichever format it was written?"""
    return is_part(name) or is_state_file(name)


def _one_folder(given: Any, world: World, operation: str) -> Any:
    """Return what the first rank of this machine was given: its ranks share one folder, and a name may hold the time.

    Collective: every rank.
    """
    named = gather_object([(world.node_rank, None if given is None else os.fspath(given))])
    first: dict[int, str | None] = {}
    for node_rank, folder in named:
        first.setdefault(node_rank, folder)
    others = [rank for rank, (node_rank, folder) in enumerate(named) if folder != first[node_rank]]
    if others:
        warn(
            f"{operation}() was given other folders on ranks {', '.join(map(str, others))} than on the first rank of their "
            f"machine. A checkpoint is one folder for all ranks: they use {first[named[others[0]][0]]}, too."
        )
    return first[world.node_rank]
