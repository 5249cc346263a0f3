"""Reads checkpoints of torch.distributed.checkpoint (DCP), which FSDP2 with Accelerate, torchtitan and Lightning write.

Programs nest the same state dicts in different ways. What DCP stores under a name is found by what it is: an optimizer is where
``param_groups`` is, and its model is where the parameters are that it names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.checkpoint.commit import place_of
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.accelerate import state_beside_models
from echelon.checkpoint.formats.dcp_files import METADATA, DcpIndex, Entry, place_of_tensor, read_index, read_object
from echelon.checkpoint.formats.weight_files import plain_names
from echelon.checkpoint.manifest import Manifest
from echelon.checkpoint.read import Checkpoint, ChunkPlace, ForeignContent
from echelon.checkpoint.regions import Chunk, ChunkTable, TensorLayout, uncovered
from echelon.checkpoint.tensor_names import model_prefix, state_name
from echelon.compat.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

_OF_ACCELERATE = re.compile(rf"({FSDP_MODEL_NAME}|{OPTIMIZER_NAME})_(\d+)")
_GROUPS = re.compile(r"(?:(.+?)\.)?param_groups(?:\.|$)")
_SCHEDULER = re.compile(r"(lr_)?schedulers?(?=\.|$)")
_FILE_OF_RANK = re.compile(r".*__(\d+)_\d+\.distcp")


def open_dcp(folder: Path) -> Checkpoint:
    """Open a checkpoint that torch.distributed.checkpoint wrote, itself or in the folders of Accelerate's ``save_state``.

    Only the indexes and the entries that are not tensors are read. Nothing in them can run code.

    Raises:
        CheckpointError: a file is missing, damaged or inconsistent, or contains anything but tensors and plain data.
    """
    folder = place_of(folder)
    found = _Found(folder)
    if (folder / METADATA).exists():
        _find_in_one(found, read_index(folder))
        beside: dict[str, Any] = {}
    else:
        _find_in_folders(found, folder)
        beside = state_beside_models(folder)
    return found.checkpoint(beside)


def warn_of_missing_state(checkpoint: Checkpoint) -> None:
    """Warn of the state that a checkpoint opened with ``open_dcp`` lacks, and of what it has that was not read."""
    unused = checkpoint.manifest.layout.get("not_read")
    if checkpoint.rank_objects(0) is None or "random" not in (checkpoint.rank_objects(0) or {}):
        warn(
            _(
                "{folder} was written by torch.distributed.checkpoint; it holds no RNG states and no positions in the data, so a resumed "
                "run begins an epoch",
                folder=checkpoint.folder,
            )
        )
    if unused:
        warn(
            _(
                "{folder} also holds {names}, which belong to none of its models, optimizers and schedulers and were not read",
                folder=checkpoint.folder,
                names=", ".join(unused),
            )
        )


@dataclass
class _Found:
    """What was found in a checkpoint, by its names in echelon's format."""

    folder: Path
    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    entries: dict[tuple[str, tuple[int, ...]], Entry] = field(default_factory=dict)
    """The place of each chunk, by tensor and offset."""
    extras: list[dict[str, Any]] = field(default_factory=list)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    values: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """The entries of each optimizer's state that are not tensors, by parameter."""
    schedulers: list[Any] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    indexes: list[DcpIndex] = field(default_factory=list)

    def add_tensor(self, name: str, index: DcpIndex, key: str) -> None:
        """Add the tensor ``key`` of an index under ``name``."""
        tensor = index.tensors[key]
        chunks = []
        for box, entry in tensor.chunks.items():
            match = _FILE_OF_RANK.fullmatch(entry.path.name)
            chunks.append(Chunk(int(match[1]) if match else 0, box))
            self.entries[name, box.offset] = entry
        layout = TensorLayout(tensor.dtype, tensor.shape, ChunkTable.of(chunks, len(tensor.shape)))
        problem = uncovered(layout)
        if problem is not None:
            raise damaged(f"the tensor {key} in {self.folder}: {problem}")
        self.layouts[name] = layout

    def add_model(self, index: DcpIndex, keys: Mapping[str, str]) -> None:
        """Add a model, given its keys in an index by name."""
        number, extras = len(self.extras), {}
        for name, key in plain_names(dict(keys)).items():
            if key in index.tensors:
                self.add_tensor(f"{model_prefix(number)}{name}", index, key)
            else:
                extras[name] = read_object(index.objects[key])
        self.extras.append(extras)

    def add_optimizer(self, index: DcpIndex, root: str, model: int) -> None:
        """Add the optimizer whose state dict is under ``root``."""
        number, prefix = len(self.groups), model_prefix(model)
        groups = _groups_under(index, root)
        start = f"{root}state."
        named = {name for group in groups for name in group["params"]}
        plain = {name: f"{prefix}{short}" for name, short in zip(named, plain_names(dict.fromkeys(named)))}
        values: dict[str, dict[str, Any]] = {}
        for key in [*index.tensors, *index.objects]:
            if not key.startswith(start):
                continue
            name, _dot, entry = key.removeprefix(start).rpartition(".")
            if name not in plain:
                raise CheckpointError(
                    _("{key} in {folder} belongs to none of the optimizer's parameters", key=key, folder=self.folder),
                    do=_(
                        "load the checkpoint in the program that wrote it, and save the optimizer's state dict as torch returns it"
                    ),
                )
            if key in index.tensors:
                self.add_tensor(state_name(number, plain[name], entry), index, key)
            else:
                values.setdefault(plain[name], {})[entry] = read_object(index.objects[key])
        self.values.append(values)
        self.groups.append([{**group, "params": [plain[name] for name in group["params"]]} for group in groups])

    def checkpoint(self, beside: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint, with the state that Accelerate stores ``beside`` the models."""
        ranks = beside.get("ranks", ())
        world_size = len(ranks) or 1 + max(
            (int(one.chunks.ranks.max(initial=0)) for one in self.layouts.values()), default=0
        )
        own: dict[int, dict[str, Any]] = {
            rank: {"positions": [], "pass": None, **of_rank} for rank, of_rank in enumerate(ranks)
        }
        if any(self.values):
            own.setdefault(0, {})["optimizer_values"] = self.values
        objects = {
            "accelerator": {"step": beside.get("step", 0), "num_models": len(self.extras)},
            "extra_states": self.extras,
            "optimizer_groups": self.groups,
            "schedulers": self.schedulers,
            "scaler": None,
            "orders": [],
            **beside.get("objects", {}),
        }
        manifest = Manifest(
            token="",
            created="",
            written_by="torch.distributed.checkpoint",
            world_size=world_size,
            progress=beside.get("progress"),
            config=None,
            layout={
                "imported_from": "torch.distributed.checkpoint",
                "world_size": world_size,
                **({"not_read": self.unused} if self.unused else {}),
            },
            files={},
            tensors=self.layouts,
        )

        def place(name: str, chunk: Chunk) -> ChunkPlace:
            entry = self.entries[name, chunk.box.offset]
            return place_of_tensor(entry, dtype=self.layouts[name].dtype, shape=chunk.box.lengths)

        def problems() -> list[str]:
            return [problem for index in self.indexes for problem in index.problems()]

        foreign = ForeignContent(manifest=manifest, objects=objects, rank_objects=own, place=place, problems=problems)
        return Checkpoint(self.folder, foreign=foreign)


def _find_in_one(found: _Found, index: DcpIndex) -> None:
    """Find models, optimizers and schedulers in one index."""
    found.indexes.append(index)
    keys = [*index.tensors, *index.objects]
    roots = sorted({f"{match[1]}." if match[1] else "" for key in keys if (match := _GROUPS.match(key))}, key=_numbered)
    of_optimizers = tuple(f"{root}{part}" for root in roots for part in ("state.", "param_groups"))
    others = [key for key in keys if not key.startswith(of_optimizers)]
    weights = [key for key in others if key in index.tensors]
    prefixes = {
        root: _prefix_of(
            [name for group in _groups_under(index, root) for name in group["params"]], weights, root, found
        )
        for root in roots
    }
    models = list(dict.fromkeys(prefixes.values())) or [_only_prefix(weights, index, found.folder)]
    for prefix in models:
        own = [key for key in others if _is_of_model(key, prefix, models, index)]
        found.add_model(index, {key.removeprefix(prefix): key for key in own})
        others = [key for key in others if key not in {*own}]
    for root, prefix in prefixes.items():
        found.add_optimizer(index, root, models.index(prefix))
    scheduled = [key for key in others if _SCHEDULER.match(key) and key in index.objects]
    for name in sorted({match[0] for key in scheduled if (match := _SCHEDULER.match(key))}):
        state = _nested(
            {
                index.paths.get(key, (key,))[1:]: read_object(index.objects[key])
                for key in scheduled
                if key == name or key.startswith(f"{name}.")
            }
        )
        found.schedulers += state if isinstance(state, list) else [state]
    found.unused = sorted({key.partition(".")[0] for key in others if key not in scheduled})


def _is_of_model(key: str, prefix: str, prefixes: Sequence[str], index: DcpIndex) -> bool:
    """Return whether an entry belongs to the model under ``prefix``."""
    if not key.startswith(prefix) or (key in index.objects and not key.endswith("_extra_state")):
        return False
    if any(len(other) > len(prefix) and key.startswith(other) for other in prefixes):
        return False
    return bool(prefix) or len(index.paths.get(key, (key,))) == 1  # not, for example, train_state.step


def _find_in_folders(found: _Found, folder: Path) -> None:
    """Find the models and optimizers that Accelerate writes to one folder each."""
    numbered = sorted(
        (match[1] == OPTIMIZER_NAME, int(match[2]), path)
        for path in folder.iterdir()
        if (match := _OF_ACCELERATE.fullmatch(path.name)) and path.is_dir()
    )
    for is_optimizer, number, path in numbered:
        index = read_index(path)
        found.indexes.append(index)
        keys = [*index.tensors, *index.objects]
        if not is_optimizer:
            prefix = _only_prefix([*index.tensors], index, folder)
            own = [key for key in keys if _is_of_model(key, prefix, [prefix], index)]
            found.add_model(index, {key.removeprefix(prefix): key for key in own})
            continue
        root = next((f"{match[1]}." if match[1] else "" for key in keys if (match := _GROUPS.match(key))), "")
        # Accelerate does not say which model an optimizer belongs to.
        named = [name for group in _groups_under(index, root) for name in plain_names(dict.fromkeys(group["params"]))]
        fitting = [
            i for i in range(len(found.extras)) if all(f"{model_prefix(i)}{name}" in found.layouts for name in named)
        ]
        if not fitting:
            raise CheckpointError(
                _("no model in {folder} has all parameters of {optimizer}", folder=folder, optimizer=path.name),
                do=_("load a complete checkpoint"),
            )
        found.add_optimizer(index, root, number if number in fitting else fitting[0])
    if not found.extras:
        raise CheckpointError(
            _("{folder} contains no model weights", folder=folder),
            do=_("pass the folder that contains {name}", name=f"{FSDP_MODEL_NAME}_0"),
        )


def _groups_under(index: DcpIndex, root: str) -> list[dict[str, Any]]:
    """Return the parameter groups of the optimizer under ``root``, with the names that it has for parameters."""
    start = f"{root}param_groups"
    if start in index.objects:
        groups = read_object(index.objects[start])
        return [dict(group) for group in groups]
    keys = {key: key.removeprefix(f"{start}.") for key in index.objects if key.startswith(f"{start}.")}
    depth = len([step for step in root.split(".") if step]) + 1
    if any(type(step) is int for key in keys for step in index.paths.get(key, ())[depth : depth + 1]):
        numbered: dict[int, dict[str, Any]] = {}
        for key, short in keys.items():
            number, _dot, option = short.partition(".")
            numbered.setdefault(int(number), {})[option] = read_object(index.objects[key])
        return [numbered[number] for number in sorted(numbered)]
    # By parameter, as get_optimizer_state_dict(flatten_optimizer_state_dict=True) returns them. Equal options are one group.
    options: dict[str, dict[str, Any]] = {}
    for key, short in keys.items():
        name, _dot, option = short.rpartition(".")
        options.setdefault(name, {})[option] = read_object(index.objects[key])
    found: list[dict[str, Any]] = []
    for name, own in options.items():
        same = next((group for group in found if {k: v for k, v in group.items() if k != "params"} == own), None)
        if same is None:
            found.append({**own, "params": [name]})
        else:
            same["params"].append(name)
    return found


def _prefix_of(named: Sequence[str], weights: Collection[str], root: str, found: _Found) -> str:
    """Return the prefix of the model that has the ``named`` parameters of the optimizer under ``root``."""
    keys = {*weights}
    candidates = [key.removesuffix(named[0]) for key in keys if key.endswith(named[0])] if named else []
    fitting = [prefix for prefix in candidates if all(f"{prefix}{name}" in keys for name in named)]
    if not fitting:
        raise CheckpointError(
            _(
                "no model in {folder} has all parameters of the optimizer under {root} ({names})",
                folder=found.folder,
                root=f"{root}param_groups",
                names=", ".join(named[:3]),
            ),
            do=_(
                "save the model and the optimizer with the names of get_model_state_dict() and get_optimizer_state_dict()"
            ),
        )
    return min(fitting, key=len)


def _only_prefix(keys: Sequence[str], index: DcpIndex, folder: Path) -> str:
    """Return under which name the weights were saved, if there is no optimizer that names them."""
    paths = [index.paths.get(key, (key,)) for key in keys]
    tops = {str(path[0]) for path in paths if len(path) > 1}
    if not tops:
        return ""
    top = next((name for name in ("model", "state_dict", "module") if name in tops), min(tops))
    if len(tops) > 1 and top not in ("model", "state_dict", "module"):
        raise CheckpointError(
            _(
                "{folder} holds tensors under {names}, and it is unclear which are the model",
                folder=folder,
                names=", ".join(sorted(tops)),
            ),
            do=_("save the model's state dict under the name 'model'"),
        )
    paths = [path for path in paths if path[0] == top]
    depth = 1
    while all(len(path) > depth + 1 and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return "".join(f"{step}." for step in paths[0][:depth])


def _numbered(text: str) -> list[Any]:
    """Return a sort key that sorts ``optimizer_10`` after ``optimizer_9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _nested(entries: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Return the nested dicts and lists with these entries."""
    if () in entries:
        return entries[()]
    inner: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in entries.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    built = {step: _nested(own) for step, own in inner.items()}
    return [built[i] for i in sorted(built)] if all(type(step) is int for step in built) else built
