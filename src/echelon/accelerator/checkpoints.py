"""Saving and loading the state of an Accelerator: where it goes, its hooks, what is registered, how many are kept."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.accelerator.project import ProjectConfiguration
from echelon.accelerator.state_files import (
    collect_state,
    is_state_file,
    load_accelerator_state,
    load_custom_state,
    require_custom_states,
    require_plain,
    write_custom_state,
    write_state,
)
from echelon.accelerator.weights import write_shards
from echelon.base.errors import UsageError
from echelon.base.protocols import SupportsStateDict
from echelon.base.warnings import warn
from echelon.checkpoint.aside import written_aside
from echelon.checkpoint.numbered import numbered, remove_oldest
from echelon.distributed.collectives import gather_object
from echelon.distributed.control import fail_together
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator

__all__ = ["Checkpoints"]

_PREFIX = "checkpoint_"


class Checkpoints:
    """The state of one Accelerator on disk."""

    def __init__(self, project: ProjectConfiguration) -> None:
        self._project = project
        self.custom_objects: list[Any] = []
        """Saved and loaded beside what was prepared."""
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def register(self, objects: Sequence[Any]) -> None:
        """See ``Accelerator.register_for_checkpointing``."""
        invalid = [f"{i} ({type(o).__name__})" for i, o in enumerate(objects) if not isinstance(o, SupportsStateDict)]
        if invalid:
            raise UsageError(
                f"register_for_checkpointing: argument {', '.join(invalid)} has no state_dict and load_state_dict",
                do="give it both, or store what it holds in an object that has them",
            )
        for one in objects:
            require_plain(one)
        self.custom_objects.extend(objects)

    def add_hook(self, hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
        """Add ``hook``; the handle removes it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def save(self, accelerator: Accelerator, output_dir: Any, *, safe_serialization: bool) -> Path:
        """See ``Accelerator.save_state``."""
        world = accelerator.world
        target = self._next(_one_folder(output_dir, world, "save_state"))
        accelerator._engine.settle()
        models = _bare_models(accelerator)
        weights = [accelerator.get_state_dict(model) for model in accelerator._models]
        random_states = accelerator._close_books()
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
        with written_aside(target.resolve(), world=world, is_part=is_state_file) as aside:
            for hook in list(self.save_hooks.values()):
                hook(models, weights, str(aside.folder))
            is_gathered = any(one is None for one in (*weights, *state.optimizers))  # on rank zero alone
            each = self._project.save_on_each_node and not is_gathered
            writes_shared = aside.is_owner if each else world.is_rank_zero
            write_state(
                aside.folder,
                state,
                rank=world.rank,
                writes_shared=writes_shared,
                safe_serialization=safe_serialization,
            )
            if writes_shared:
                for i, one in enumerate(self.custom_objects):
                    write_custom_state(one, aside.folder, i)
        limit = self._project.total_limit
        if self._project.automatic_checkpoint_naming and limit is not None:
            with fail_together("deleting old checkpoints"):
                if aside.is_owner:
                    remove_oldest(target.parent, prefix=_PREFIX, limit=limit, keep=target)
        self._project.iteration += 1
        return target

    def load(
        self, accelerator: Accelerator, input_dir: Any, load_kwargs: dict[str, Any] | None, options: dict[str, Any]
    ) -> None:
        """See ``Accelerator.load_state``."""
        accelerator._engine.settle()
        map_location = options.pop("map_location", None)
        input_dir = _one_folder(input_dir, accelerator.world, "load_state")
        with fail_together("load_state"):
            folder = self._source(input_dir)
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
                **options,
            )
            accelerator.step = changes.get("step", accelerator.step)
            accelerator._reopen_books(changes.get("progress"))
            for i, one in enumerate(self.custom_objects):
                load_custom_state(one, folder, i)

    def save_model(
        self, accelerator: Accelerator, model: nn.Module, folder: Path, *, max_shard_size: int | str, safe: bool
    ) -> None:
        """See ``Accelerator.save_model``."""
        state = accelerator.get_state_dict(model)
        with fail_together("save_model"):
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
                write_shards(state, folder, max_shard_size=max_shard_size, safe_serialization=safe)

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
        if target.exists():
            raise UsageError(
                f"the checkpoint {target} is there already",
                do="set accelerator.project_configuration.iteration to the number that comes next (after load_state: the "
                "one after the number that was loaded), or use another project_dir",
            )
        return target

    def _source(self, input_dir: Any) -> Path:
        """Return what to load."""
        if input_dir is not None:
            folder = Path(input_dir).expanduser()
            if not folder.is_dir():
                raise UsageError(f"there is no folder {folder}", do="give a folder that save_state wrote")
            return folder
        if not self._project.automatic_checkpoint_naming:
            raise UsageError(
                "load_state() was given no folder",
                do="give input_dir, or use ProjectConfiguration(automatic_checkpoint_naming=True)",
            )
        found = numbered(self._folder(), prefix=_PREFIX)
        if not found:
            raise UsageError(f"{self._folder()} holds no checkpoint", do="give input_dir, or save one first")
        return found[-1]

    def _folder(self) -> Path:
        if self._project.project_dir is None:
            raise UsageError(
                "automatic_checkpoint_naming needs a project_dir",
                do="use Accelerator(project_dir=...), or give it to the configuration",
            )
        return Path(os.fspath(self._project.project_dir)) / "checkpoints"


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
