"""Saving and loading the state of an Accelerator: where it goes, its hooks, what is registered, how many are kept."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from echelon.accelerator.checkpoint.folders import count_failures, has_checkpoint, newest_whole
from echelon.accelerator.checkpoint.state_names import Allowed
from echelon.accelerator.checkpoint.training_state import content_of, load_content
from echelon.accelerator.models.model_sizes import convert_file_size_to_int
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.base import environ
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsStateDict
from echelon.base.warnings import warn
from echelon.checkpoint import typed_json
from echelon.checkpoint.background_save import BackgroundSaver, SaveFailures
from echelon.checkpoint.commit import clean, make_folders, place_of, require_folder_or_nothing
from echelon.checkpoint.formats.accelerate import custom_path, is_state_file, missing_files, write_state
from echelon.checkpoint.formats.layouts import layout_of, require_layout
from echelon.checkpoint.formats.torch_files import write_plain
from echelon.checkpoint.formats.weight_files import write_shards
from echelon.checkpoint.lock import RunLock
from echelon.checkpoint.manifest import is_part
from echelon.checkpoint.read import Checkpoint, open_verified
from echelon.checkpoint.rotation import numbered, remove_oldest
from echelon.checkpoint.save import Save, SaveFailedError, as_save_failure, begin_save, run_on_all_ranks, save_folder
from echelon.checkpoint.storage import LocalStorage
from echelon.checkpoint.tensor_names import model_prefix
from echelon.distributed.collectives import gather_object
from echelon.distributed.control import agree, raise_on_all_ranks
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator

__all__ = ["Checkpoints"]

_PREFIX = "checkpoint_"
_logger = get_logger(__name__)


class Checkpoints:
    """The state of one Accelerator on disk."""

    def __init__(self, project: ProjectConfiguration) -> None:
        self._project = project
        self.custom_objects: list[Any] = []
        """Saved and loaded beside what was prepared."""
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._background = BackgroundSaver()
        self.failures = SaveFailures(project.max_failed_saves)
        self._lock: RunLock | None = None
        self.data_policy = DataPolicy()
        """What changed data mean, unless a call says that they are allowed; the Trainer knows places of its own."""
        self._place: Path | None = None
        """Where this run alone may write, for as long as a block of ``alone_in`` lasts."""

    def register(self, objects: Sequence[Any]) -> None:
        """See ``Accelerator.register_for_checkpointing``."""
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

    def add_hook(self, hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
        """Add ``hook``; the handle removes it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def save(
        self,
        accelerator: Accelerator,
        output_dir: Any,
        *,
        safe_serialization: bool,
        blocking: bool = True,
        metric: Any = None,
    ) -> Path:
        """See ``Accelerator.save_state``."""
        world = accelerator.world
        target = self._next(_one_folder(output_dir, world, "save_state"))
        accelerator._engine.update_loss_scale()
        if safe_serialization and self._chosen_format() == "echelon":
            metric = None if metric is None else float(metric)
            return self._save_own(accelerator, target, blocking=blocking, metric=metric)
        if not blocking or metric is not None:
            raise UsageError(
                f"save_state({'metric=' if blocking else 'blocking=False'}) needs echelon's own checkpoint format",
                do="leave out checkpoint_format='accelerate' and safe_serialization=False, or that argument",
            )
        self.wait()
        models = _bare_models(accelerator)
        weights = [accelerator.get_state_dict(model) for model in accelerator._models]
        random_states = accelerator._snapshot_progress()
        state = collect_state(
            weights=weights,
            optimizers=accelerator._optimizers,
            schedulers=accelerator._schedulers,
            dataloaders=accelerator._dataloaders,
            scaler=accelerator.scaler,
            step=accelerator.step,
            progress={**accelerator.progress.to_json(), "micro_step": 0},
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
            self._lock_numbered(target, is_first=is_first, lock_of=_lock_beside)
            is_owner = save_folder(target, write, world=world, is_part=_is_ours, fence=self.fence)
            # Together: who has returned sees the folder as it stays.
            run_on_all_ranks("deleting old checkpoints", lambda: self._rotate(target, is_owner), gather_bytes)

        if count_failures(accelerator, save):
            self._project.iteration += 1
        return target

    def load(
        self, accelerator: Accelerator, input_dir: Any, load_kwargs: dict[str, Any] | None, options: dict[str, Any]
    ) -> None:
        """See ``Accelerator.load_state``."""
        accelerator._engine.update_loss_scale()
        self.wait()
        map_location = options.pop("map_location", None)
        allowed = Allowed(options.pop("allow_missing", ()))
        given = options.pop("allow_changed_data", None)
        allows = accelerator._config.value.allow_changed_data if given is None else given
        data = replace(self.data_policy, allows_changes=allows or self.data_policy.allows_changes)
        input_dir = _one_folder(input_dir, accelerator.world, "load_state")
        folder, checkpoint = self._source(accelerator, input_dir)
        if checkpoint is not None:
            with raise_on_all_ranks("load_state"):
                strict = options.pop("strict", True)
                self._load_own(accelerator, checkpoint, strict=strict, allowed=allowed, data=data, others=options)
            return
        if allowed:
            raise UsageError(
                "load_state(allow_missing=) needs echelon's own checkpoint format, and this is none",
                do="leave it out, or load a checkpoint of echelon",
            )
        with raise_on_all_ranks("load_state"):
            require_custom_states(folder, len(self.custom_objects))
            models = _bare_models(accelerator)
            for hook in list(self.load_hooks.values()):
                hook(models, str(folder))
            changes = load_accelerator_state(
                folder,
                models,
                accelerator._optimizers,
                accelerator._schedulers,
                accelerator._dataloaders,
                accelerator.process_index,
                accelerator.scaler,
                map_location,
                load_kwargs,
                data=data,
                **options,
            )
            accelerator.step = changes.get("step", accelerator.step)
            accelerator._restore_progress(changes.get("progress"))
            for i, one in enumerate(self.custom_objects):
                load_custom_state(one, folder, i)

    def resume(self, accelerator: Accelerator, path: Any, *, must_exist: bool, **options: Any) -> bool:
        """See ``Accelerator.resume``."""
        is_named = self._project.automatic_checkpoint_naming
        if path is None and not is_named:
            raise UsageError(
                "resume() was given no folder",
                do="give it the folder that save_state is given, or use ProjectConfiguration(automatic_checkpoint_naming=True)",
            )
        self.wait()
        folder = _one_folder(path, accelerator.world, "resume")
        with raise_on_all_ranks("resume"):
            found = numbered(self._folder(), prefix=_PREFIX) if is_named else []
            if folder is None:
                place = self._folder()
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
        self.load(accelerator, folder, None, options)
        with raise_on_all_ranks("resume"):
            accelerator._go_on()
        if is_named:  # also those that were passed over have a number
            last = max(int(one.name.removeprefix(_PREFIX)) for one in found) if found else -1
            self._project.iteration = max(gather_object([last])) + 1
        return True

    # ---- echelon's own format ----------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Return when no checkpoint is being written; one that the disk did not take is reported.

        Raises:
            TooManyFailedSavesError: it was the last that is borne.
        """
        if self._background.is_idle:
            return
        try:
            self._background.wait()
        except SaveFailedError as error:
            self.failures.failed(error)
        else:
            self.failures.succeeded()

    @property
    def fence(self) -> Callable[[], None] | None:
        """What raises when another run has taken the place of this one; None: nothing is locked by this process."""
        return None if self._lock is None else self._lock.require

    @contextmanager
    def alone_in(self, accelerator: Accelerator, folder: Path, *, belongs: Callable[[str], bool]) -> Iterator[None]:
        """Keep other runs from writing checkpoints to ``folder`` in the block; what killed saves left there is removed.

        Args:
            accelerator: of this object.
            folder: one in which the block is entered already is not locked again.
            belongs: tells by its name whether something in ``folder`` is a checkpoint of this run.

        Collective: every rank.

        Raises:
            CheckpointError: another run has it, and which.
        """
        folder = folder.resolve()
        if folder == self._place:
            yield
            return
        each = self._project.save_on_each_node and accelerator.capabilities.exposes_state
        lock, place = self._lock, self._place
        try:
            with raise_on_all_ranks(f"locking {folder}"):
                if accelerator.process_index == 0 or (each and accelerator.is_local_main_process):
                    make_folders(LocalStorage(), folder)
                    self._lock = RunLock(_lock_inside(folder))
                    clean(LocalStorage(), folder, belongs=belongs)
            self._place = folder
            yield
        finally:
            if self._lock is not None and self._lock is not lock:
                self._lock.release()
            self._lock, self._place = lock, place

    def close(self) -> None:
        """Wait for what is being written, and let other runs write here."""
        self.wait()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _chosen_format(self) -> str:
        chosen = self._project.checkpoint_format or environ.get("ECHELON_CHECKPOINT_FORMAT") or "echelon"
        if chosen not in ("echelon", "accelerate"):
            raise UsageError(
                f"checkpoint_format={chosen!r} is not one of 'echelon', 'accelerate'", do="give one of them"
            )
        return chosen

    def _save_own(self, accelerator: Accelerator, target: Path, *, blocking: bool, metric: float | None) -> Path:
        world = accelerator.world
        # What is gathered is on rank zero alone, so only one checkpoint can be made of it.
        each = self._project.save_on_each_node and accelerator.capabilities.exposes_state
        self.wait()
        is_first = world.rank == 0 or (each and world.is_local_rank_zero)
        models = _bare_models(accelerator)
        random_states = accelerator._snapshot_progress()
        with raise_on_all_ranks("collecting the state"):
            content = content_of(
                accelerator, models, custom_objects=self.custom_objects, random_states=random_states, metric=metric
            )
        try:
            self._lock_numbered(target, is_first=is_first, lock_of=_lock_inside)
            save = begin_save(
                target,
                content,
                world=world,
                is_part=_is_ours,
                fence=self.fence,
                on_each_node=each,
            )
            if self.save_hooks:
                self._run_save_hooks(accelerator, models, save)
            if blocking:
                save.finish()
                self.failures.succeeded()
                self._rotate(target, is_first)
            else:
                self._background.start(save, afterwards=lambda folder: self._rotate(folder, is_first))
        except SaveFailedError as error:
            self.failures.failed(error)
            return target
        self._project.iteration += 1
        return target

    def _lock_numbered(self, target: Path, *, is_first: bool, lock_of: Callable[[Path], Path]) -> None:
        """Keep other runs out of the folder of numbered checkpoints; what killed saves have left there is removed.

        Collective: every rank.
        """

        def lock() -> None:
            if is_first and self._project.automatic_checkpoint_naming and self._lock is None:
                storage = LocalStorage()
                folder = storage.real_path(target.parent)
                make_folders(storage, folder)
                self._lock = RunLock(lock_of(folder))
                clean(storage, folder, belongs=_is_numbered)

        run_on_all_ranks("locking the folder of the checkpoints", as_save_failure(lock, target), gather_bytes)

    def _run_save_hooks(self, accelerator: Accelerator, models: list[nn.Module], save: Save) -> None:
        """Let the hooks write files of their own; models whose weights they take out of the list are not written.

        Collective: where parameters are sharded.
        """
        weights = [accelerator.get_state_dict(model) or {} for model in accelerator._models]
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

    def _rotate(self, target: Path, is_first: bool) -> None:
        limit = self._project.total_limit
        if not (is_first and self._project.automatic_checkpoint_naming and limit is not None):
            return
        try:
            remove_oldest(
                target.parent,
                prefix=_PREFIX,
                limit=limit,
                keep=[target, *self._best(target.parent)],
                keep_every=self._project.keep_every,
            )
        except OSError as error:
            warn(f"{target} is saved, but older checkpoints could not be deleted: {error}")

    def best(self) -> Path | None:
        """See ``Accelerator.best_checkpoint``."""
        return next(iter(self._best(self._folder(), 1)), None)

    def _best(self, folder: Path, number: int | None = None) -> list[Path]:
        """Return the checkpoints in ``folder`` with the best metrics, the best first; of equal ones the newer."""
        number = self._project.keep_best if number is None else number
        if not number:
            return []
        measured = [
            (metric, i, path)
            for i, path in enumerate(numbered(folder, prefix=_PREFIX))
            if (metric := _metric_of(path)) is not None
        ]
        sign = 1 if self._project.greater_is_better else -1
        return [path for _, _, path in sorted(measured, key=lambda one: (-sign * one[0], -one[1]))[:number]]

    def _source(self, accelerator: Accelerator, input_dir: Any) -> tuple[Path, Checkpoint | None]:
        """Return what to load: where it is, and, of echelon's own format, the verified checkpoint.

        Collective: every rank.
        """
        storage, world = LocalStorage(), accelerator.world
        if input_dir is not None:
            folder = Path(input_dir).expanduser().absolute()
        elif not self._project.automatic_checkpoint_naming:
            raise UsageError(
                "load_state() was given no folder",
                do="give input_dir, or use ProjectConfiguration(automatic_checkpoint_naming=True)",
            )
        else:
            found = self._newest(accelerator)
            return place_of(storage, found), Checkpoint(found) if layout_of(found) == "echelon" else None
        if agree(layout_of(folder) == "echelon"):
            return folder, open_verified(folder, world=world)
        with raise_on_all_ranks("load_state"):
            require_layout(folder)
        return place_of(storage, folder), None

    def _newest(self, accelerator: Accelerator) -> Path:
        """Return the newest of the numbered checkpoints that is whole; what is passed over is told. Collective."""

        def lacks(path: Path) -> str | None:
            if layout_of(path) == "echelon":
                return None
            place = place_of(LocalStorage(), path)
            missing = missing_files(
                place,
                num_models=0 if self.load_hooks else len(accelerator._models),
                num_optimizers=len(accelerator._optimizers),
                num_schedulers=len(accelerator._schedulers),
                has_scaler=accelerator.scaler is not None,
            )
            return f"{place} has no {', '.join(missing)}" if missing else None

        found, passed_over = newest_whole(accelerator.world, self._folder(), prefix=_PREFIX, usable=lacks)
        skipped = "\n".join(f"    {path.name}: {why}" for path, why in passed_over)
        if found is None and not skipped:
            raise UsageError(f"{self._folder()} holds no checkpoint", do="give input_dir, or save one first")
        if found is None:
            raise CheckpointError(
                f"{self._folder()} holds no whole checkpoint\n{skipped}",
                do="load one from elsewhere; to start from scratch, give another project_dir",
            )
        if skipped:
            warn(f"{found} is loaded; newer ones are not whole and were passed over:\n{skipped}")
        return found

    def _load_own(
        self,
        accelerator: Accelerator,
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
        models = _bare_models(accelerator)
        left = list(models)
        for hook in list(self.load_hooks.values()):
            hook(left, str(checkpoint.folder))
        changes = load_content(
            accelerator,
            checkpoint,
            models,
            loaded=[model for model in models if not any(model is one for one in left)],
            custom_objects=self.custom_objects,
            strict=strict,
            allowed=allowed,
            data=data,
        )
        accelerator.step = changes["step"]
        accelerator._restore_progress(changes["progress"])
        _logger.info("%s is loaded", checkpoint.folder)

    def save_model(
        self, accelerator: Accelerator, model: nn.Module, folder: Path, *, max_shard_size: int | str, safe: bool
    ) -> None:
        """See ``Accelerator.save_model``."""
        state = accelerator.get_state_dict(model)
        with raise_on_all_ranks("save_model"):
            if folder.is_file():
                raise UsageError(f"{folder} is a file, and a folder is to be there", do="give another name")
            if state is None:  # sharded: rank zero has it
                return
            on_meta = [name for name, tensor in state.items() if getattr(tensor, "is_meta", False)]
            if on_meta:
                raise UsageError(
                    f"the model has no values on this process: {', '.join(on_meta[:3])} are on the meta device",
                    do="load its weights first",
                )
            world, each = accelerator.world, self._project.save_on_each_node
            if world.is_local_rank_zero if each else world.is_rank_zero:
                max_bytes = convert_file_size_to_int(max_shard_size)
                write_shards(state, folder, max_shard_bytes=max_bytes, safe_serialization=safe)

    def _next(self, output_dir: Any) -> Path:
        """Return where the next checkpoint goes."""
        if not self._project.automatic_checkpoint_naming:
            if output_dir is None:
                raise UsageError(
                    "save_state() was given no folder",
                    do="give output_dir, or use ProjectConfiguration(automatic_checkpoint_naming=True)",
                )
            return Path(output_dir).expanduser()
        target = self._folder() / f"{_PREFIX}{self._project.iteration}"
        if place_of(LocalStorage(), target).exists():
            raise UsageError(
                f"the checkpoint {target} is there already",
                do="set accelerator.project_configuration.iteration to the number that comes next (after load_state: the "
                "one after the number that was loaded), or use another project_dir",
            )
        return target

    def _folder(self) -> Path:
        if self._project.project_dir is None:
            raise UsageError(
                "automatic_checkpoint_naming needs a project_dir",
                do="use Accelerator(project_dir=...), or give it to the configuration",
            )
        return Path(os.fspath(self._project.project_dir)) / "checkpoints"


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


def _metric_of(folder: Path) -> float | None:
    """Return how good a checkpoint is; None when nobody said, or it cannot be read."""
    try:
        metric = Checkpoint(folder).objects().get("accelerator", {}).get("metric")
    except (CheckpointError, OSError):
        return None
    return metric if isinstance(metric, (int, float)) and not math.isnan(metric) else None


def _is_numbered(name: str) -> bool:
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdigit()


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


def _bare_models(accelerator: Accelerator) -> list[nn.Module]:
    """Return the user's own models: those that Accelerate gives to hooks, which call methods of theirs."""
    return [accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]


def _lock_inside(folder: Path) -> Path:
    return folder / ".lock"


def _lock_beside(folder: Path) -> Path:
    """Accelerate's load_state, and scripts written for it, take whatever is in the folder for a numbered checkpoint."""
    return folder.parent / f".{folder.name}.lock"
