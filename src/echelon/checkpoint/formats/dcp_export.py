"""Writes checkpoints of torch.distributed.checkpoint (DCP), with torch's own writer."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.checkpoint.formats.conversion import num_models_in
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import ChunkBounds
from echelon.checkpoint.tensor_file import require_dtype
from echelon.checkpoint.tensor_names import model_prefix, state_keys, state_name, state_values

_Path = tuple[str | int, ...]


def export_dcp(checkpoint: Checkpoint, folder: Path, *, progress: Callable[[int], None] = lambda _: None) -> None:
    """Write the models, optimizers and schedulers of ``checkpoint`` to ``folder`` with torch.distributed.checkpoint.

    The state dicts are nested as in torch's documentation: ``model``, ``optimizer`` and ``scheduler`` (with a number from the second
    on). Only one chunk at a time is held in memory.

    Raises:
        CheckpointError: the checkpoint has no models.
    """
    objects = checkpoint.objects()
    if not num_models_in(checkpoint):
        raise CheckpointError(
            _("{folder} has no models in echelon's own format", folder=checkpoint.folder),
            do=_("run echelon checkpoint show to see what it contains"),
        )
    items: dict[_Path, str | Any] = {}
    tensors: dict[_Path, str] = {}
    for i in range(num_models_in(checkpoint)):
        top, prefix = _name("model", i), model_prefix(i)
        tensors |= {(top, n.removeprefix(prefix)): n for n in checkpoint.names() if n.startswith(prefix)}
        items |= {(top, name): value for name, value in objects.get("extra_states", [{}] * (i + 1))[i].items()}
    for i, groups in enumerate(objects.get("optimizer_groups", ())):
        top = _name("optimizer", i)
        names = [name for group in groups for name in group["params"]]
        keys, values = state_keys(checkpoint, i, names), state_values(checkpoint, i)
        for name in names:
            short = _without_model(name)
            tensors |= {(top, "state", short, key): state_name(i, name, key) for key in keys[name]}
            items |= {(top, "state", short, key): value for key, value in values.get(name, {}).items()}
        for number, group in enumerate(groups):
            own = {**group, "params": [_without_model(name) for name in group["params"]]}
            items |= {(top, "param_groups", number, option): value for option, value in own.items()}
    for i, state in enumerate(objects.get("schedulers", ())):
        items |= {(_name("scheduler", i), *path): value for path, value in _flattened(state)}
    planner = _Planner(checkpoint, tensors, items, progress)
    with warnings.catch_warnings():
        # Torch warns that one process writes the checkpoint.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({}, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)


def _name(kind: str, index: int) -> str:
    return f"{kind}_{index}" if index else kind


def _without_model(name: str) -> str:
    return re.sub(r"^models\.\d+\.", "", name)


def _flattened(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if isinstance(value, dict) and value and all(type(key) is str for key in value):
        for key, inner in value.items():
            yield from _flattened(inner, (*path, key))
    else:
        yield path, value


class _Planner(SavePlanner):
    """Lets torch write the chunks of a checkpoint, which are read when they are written."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[_Path, str],
        items: Mapping[_Path, Any],
        progress: Callable[[int], None],
    ) -> None:
        self._checkpoint, self._progress = checkpoint, progress
        self._tensors = {".".join(map(str, path)): name for path, name in tensors.items()}
        self._items = {".".join(map(str, path)): value for path, value in items.items()}
        self._paths = {".".join(map(str, path)): path for path in (*tensors, *items)}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        plan = [item for key, name in self._tensors.items() for item in self._items_of(key, name)]
        plan += [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._items]
        return SavePlan(plan)

    def _items_of(self, key: str, name: str) -> Iterator[WriteItem]:
        layout = self._checkpoint.layout(name)
        properties = TensorProperties(dtype=require_dtype(layout.dtype))
        for box in [chunk.box for chunk in layout.chunks] or [ChunkBounds.whole(layout.shape)]:
            chunk = ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.lengths))
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(layout.shape))
            yield WriteItem(index=MetadataIndex(key, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.tensor_data is None:
            stream = io.BytesIO()
            torch.save(self._items[key], stream)
            return stream
        chunk = write_item.tensor_data.chunk
        values = self._checkpoint.read(self._tensors[key], ChunkBounds(tuple(chunk.offsets), tuple(chunk.sizes)))
        self._progress(values.nbytes)
        return values
