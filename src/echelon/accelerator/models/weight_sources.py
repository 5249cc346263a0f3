"""Lists the tensors in weight files, and matches them to a model's tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from echelon.accelerator.models.weight_check import listed, shortened
from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.checkpoint.formats.torch_files import load
from echelon.compat.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor in a weight file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in the safetensors format: F32, BF16, I64, ..."""
    tensor: torch.Tensor | None
    """The memory-mapped tensor of a ``torch.save`` file; None for safetensors."""

    def read(self, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a slice of the tensor."""
        if any(one.start >= one.stop for one in part):
            return torch.empty([max(0, one.stop - one.start) for one in part])
        if self.tensor is not None:
            return self.tensor[part]
        # The file is opened per tensor, because pages read through a mapping stay resident until it is closed.
        with _opened(self.file) as file:
            values: torch.Tensor = file.get_slice(self.name)[part] if part else file.get_tensor(self.name)
            return values


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(
            f"the index names {path}, which does not exist", do="copy the complete folder, or pass a complete one"
        ) from None
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", do="use another copy") from error


def _stored_in(checkpoint: Path) -> dict[str, FileTensor]:
    found: dict[str, FileTensor] = {}
    for path in _files_of(checkpoint):
        if path.suffix == ".safetensors":
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    piece = file.get_slice(name)
                    shape = tuple(piece.get_shape())
                    found[name] = FileTensor(file=path, name=name, shape=shape, dtype=piece.get_dtype(), tensor=None)
        else:
            loaded: Mapping[str, Any] = load(path, map_location="cpu", mmap=True)
            for name, value in loaded.items():
                if isinstance(value, torch.Tensor):
                    kind = _KINDS.get(value.dtype, str(value.dtype))
                    found[name] = FileTensor(file=path, name=name, shape=tuple(value.shape), dtype=kind, tensor=value)
    return found


_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _files_of(checkpoint: Path) -> list[Path]:
    """Return the weight files that a folder or an index refers to, or the given file."""
    index = None
    if checkpoint.is_dir():
        for whole, parts in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
            if (checkpoint / whole).is_file():
                return [checkpoint / whole]
            if (checkpoint / parts).is_file():
                index = checkpoint / parts
                break
        else:
            others = sorted(checkpoint.glob("*.index.json"))
            if len(others) != 1:
                found = f"{len(others)} other indices" if others else "no other index"
                raise CheckpointError(
                    f"{checkpoint} contains neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}, and {found}",
                    do="pass a folder written by save_pretrained or save_model, an index, or a weight file",
                )
            (index,) = others
    elif not checkpoint.is_file():
        raise CheckpointError(
            f"{checkpoint} does not exist",
            do="pass a local folder of weights; Hugging Face Hub names are not supported",
        )
    elif checkpoint.suffix == ".json":
        index = checkpoint
    else:
        return [checkpoint]
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content.get("weight_map", content).values()))
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not a weight index: {error}", do="use another copy") from None
    return [index.parent / name for name in names]


# ---- matching ------------------------------------------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``model`` that a weight file would store, each under all of its names."""
    left_out = {
        joined(prefix, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for name, tensor in named_tensors(model):
        if name not in left_out:
            yield name, tensor


def _fitted_to(
    model: nn.Module, own: Mapping[str, torch.Tensor], stored: Mapping[str, FileTensor]
) -> list[tuple[str, FileTensor]]:
    """Return the entries of ``stored`` that exist in the model, under the model's names.

    Prefixes added by DDP and torch.compile are ignored, as is the prefix that distinguishes a transformers model with a
    head from its base model.
    """
    by_plain = {name.replace("_orig_mod.", ""): name for name in own}
    given = {name.replace("_orig_mod.", ""): one for name, one in stored.items()}
    prefixes = ["module."]
    base = getattr(model, "base_model_prefix", None)
    if isinstance(base, str) and base:
        prefixes.append(f"{base}.")
    found = []
    for name, one in given.items():
        ways = [name, *(p + name for p in prefixes), *(name.removeprefix(p) for p in prefixes)]
        fitting = next((way for way in ways if way in by_plain), None)
        if fitting is not None:
            found.append((by_plain[fitting], one))
    return found


def matching_tensors(
    model: nn.Module, checkpoint: Path, *, strict: bool
) -> tuple[dict[str, torch.Tensor], list[tuple[str, FileTensor]]]:
    """Return the tensors of ``model`` by name, and the stored tensors that exist in the model under the model's names.

    Raises:
        CheckpointError: the weights are missing or damaged, or belong to another model.
    """
    stored, own = _stored_in(checkpoint), dict(own_tensors(model))
    found = _fitted_to(model, own, stored)
    lacking = {id(tensor) for tensor in own.values()} - {id(own[name]) for name, _ in found}
    kind = type(model).__name__
    wrong = [
        f"{name} is {list(one.shape)} in the file and {list(own[name].shape)} in the model"
        for name, one in found
        if one.shape != tuple(own[name].shape)
    ]
    wrong += [
        f"{name} is {one.dtype} in the file and {own[name].dtype} in the model"
        for name, one in found
        if not _converts(one.dtype, own[name].dtype)
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint} does not match the {kind}: {shortened(wrong, '; ')}",
            do="build the model from the configuration saved with the weights; quantized weights require the library "
            "that wrote them",
        )
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    missing = [name for key, name in first.items() if key in lacking]
    without = [name for name in missing if own[name].is_meta]
    if without:
        raise CheckpointError(
            f"{checkpoint} has no values for {shortened(without)} of the {kind}, which are on the meta device",
            do="pass a checkpoint of this model; to add a new module (such as a head), initialize it on rank zero in "
            "a model that is not on the meta device",
        )
    names = {one.name for _, one in found}
    unknown = [name for name in stored if name not in names]
    differences = listed({"missing": missing, "unexpected": unknown})
    if differences and strict:
        raise CheckpointError(
            f"{checkpoint} does not match the {kind}: {differences}",
            do="load the weights into the model they were saved from, or pass strict=False",
        )
    if differences:
        warn(
            _(
                "{checkpoint} does not fully match the {kind}; matching weights were loaded: {differences}",
                checkpoint=checkpoint,
                kind=kind,
                differences=differences,
            )
        )
    return own, found


def _converts(stored: str, dtype: torch.dtype) -> bool:
    """Return whether the file's dtype can be converted to the model's, apart from rounding."""
    if stored in _KINDS.values():
        return dtype in _KINDS
    return dtype not in _KINDS and not dtype.is_complex


def joined(path: str, name: str) -> str:
    """Return the full name of ``name`` in the module at ``path``."""
    return f"{path}.{name}" if path else name
