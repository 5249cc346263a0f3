"""Operations on a batch's tensors: move, detach, truncate, concatenate, count samples, and prepare sequences to be cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from echelon.accelerator.metrics import is_column
from echelon.accelerator.prepare.prepare_arguments import contents, is_record, leaves, map_tensors, rebuild_like
from echelon.accelerator.sequences import shift_labels
from echelon.base.errors import ConfigError
from echelon.trainer.data.num_items import shifts_labels

__all__ = [
    "batch_size",
    "concatenate",
    "cut",
    "detach",
    "fill",
    "map_tensors",
    "sequence_inputs",
    "to_device",
    "to_numpy",
]


def to_device(data: Any, device: torch.device) -> Any:
    """Move ``data`` to ``device``; return the same object if it is already there."""
    return data if _is_on(data, device) else map_tensors(lambda tensor: tensor.to(device), data)


def detach(data: Any) -> Any:
    """Detach the tensors in ``data`` from the graph."""
    return map_tensors(lambda tensor: tensor.detach(), data)


def to_numpy(data: Any) -> Any:
    """Convert the tensors in ``data`` to numpy arrays; bfloat16 becomes float32."""
    return map_tensors(_array, data)


def batch_size(data: Any) -> int | None:
    """Return the number of samples in ``data`` (the rows of its first tensor), or None if it holds no tensor."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return None


def cut(data: Any, *, rows: int, of: int) -> Any:
    """Return the first ``rows`` of a batch's ``of`` samples; tensors and lists that do not have ``of`` rows stay unchanged."""
    if isinstance(data, (list, tuple)) and is_column(data) and batch_size(data) is None:
        return data[:rows] if len(data) == of else data
    if isinstance(data, Mapping):
        columns: Any = contents(data)
        return rebuild_like(data, {name: cut(column, rows=rows, of=of) for name, column in columns.items()})
    return map_tensors(lambda tensor: tensor[:rows] if tensor.dim() and tensor.shape[0] == of else tensor, data)


def fill(data: Any, *, rows: int, of: int) -> Any:
    """Undo ``cut``: extend each tensor with ``rows`` rows to ``of`` rows by repeating its last row."""

    def _filled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != rows:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(of - rows, *tensor.shape[1:])])

    return map_tensors(_filled, data)


def concatenate(parts: list[Any], *, padding: int = -100) -> Any:
    """Concatenate batches of the same structure along the first dimension.

    Tensors whose second dimensions differ are padded to the longest one with ``padding``.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim() > 1 and len({part.shape[1] for part in parts}) > 1:
            parts = [_lengthen(part, max(part.shape[1] for part in parts), padding) for part in parts]
        return torch.cat([part.reshape(1) if not part.dim() else part for part in parts])
    if isinstance(first, Mapping) or is_record(first):
        columns: list[Any] = [contents(part) for part in parts]
        return rebuild_like(
            first, {name: concatenate([one[name] for one in columns], padding=padding) for name in columns[0]}
        )
    if isinstance(first, (list, tuple)):
        return rebuild_like(first, [concatenate(list(column), padding=padding) for column in zip(*parts)])
    raise TypeError(f"predictions contain a {type(first).__name__}, not only tensors")


def sequence_inputs(
    model: nn.Module, inputs: Any, *, own_losses: Mapping[str, Any]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a batch with labels shifted over whole sequences and with position ids, and its tensors with the sequence.

    Args:
        model: the model, not wrapped, whose sequences are cut over ranks (``cp_size``, ``sp_size``).
        own_losses: by setting, functions that compute the loss outside the model; None if they are not set.

    Raises:
        ConfigError: the batch has no ``input_ids``, or the loss is computed outside the model.
    """
    setting = "TrainingArguments.parallelism_config (cp_size or sp_size)"
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), torch.Tensor):
        raise ConfigError(
            "the batch has no input_ids whose sequence could be cut", where=setting, do="set the size to 1"
        )
    for name, function in own_losses.items():
        if function is not None:
            raise ConfigError(
                f"{name} shifts labels inside this rank's piece of the sequence",
                where=setting,
                do="override compute_loss, which gets the batch with shift_labels, or set the size to 1",
            )
    batch = dict(inputs)
    shape = batch["input_ids"].shape[:2]
    if isinstance(batch.get("labels"), torch.Tensor) and "shift_labels" not in batch and shifts_labels(model):
        batch["shift_labels"] = shift_labels(batch["labels"])
    if "position_ids" not in batch:
        positions = torch.arange(shape[1], device=batch["input_ids"].device)
        batch["position_ids"] = positions.expand(shape[0], -1)
    # Copies of the objects, because the block changes them in place, and the loop may use the batch again.
    batch = {k: v.detach() if isinstance(v, torch.Tensor) and v.shape[:2] == shape else v for k, v in batch.items()}
    return batch, [v for v in batch.values() if isinstance(v, torch.Tensor) and v.shape[:2] == shape]


def _lengthen(tensor: torch.Tensor, length: int, padding: int) -> torch.Tensor:
    longer = tensor.new_full((tensor.shape[0], length, *tensor.shape[2:]), padding)
    longer[:, : tensor.shape[1]] = tensor
    return longer


def _is_on(data: Any, device: torch.device) -> bool:
    if isinstance(data, torch.Tensor):
        return data.device == device
    if isinstance(data, (dict, Mapping)):  # dict first: asking an abstract class calls Python functions
        data = data.values()
    elif is_record(data):
        data = leaves(data)
    elif not isinstance(data, (list, tuple)):
        return True
    for part in data:  # noqa: SIM110 - runs at every step, where a generator is several times slower
        if not (part.device == device if type(part) is torch.Tensor else _is_on(part, device)):
            return False
    return True


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
