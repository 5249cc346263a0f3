"""Models whose own files hold only adapters (PEFT): the file with the rest of their trained state, and loading of both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import safetensors
import torch
from torch import nn

from echelon.accelerator.models.save_weights import load_weights
from echelon.accelerator.models.weight_check import listed, shortened
from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.checkpoint.formats.transformers import ECHELON_WEIGHTS
from echelon.checkpoint.formats.weight_files import plain_names, read_model

_FILES = "adapter_model.*"


@runtime_checkable
class _Adapted(Protocol):
    """A model with adapters: peft's ``PeftModel``, or a transformers model after ``add_adapter``."""

    peft_config: Mapping[str, Any]

    def load_adapter(self, model_id: str, adapter_name: str, is_trainable: bool = False) -> Any:
        """Load an adapter from a directory."""
        ...


@runtime_checkable
class _Wrapper(Protocol):
    """peft's ``PeftModel``."""

    def get_base_model(self) -> nn.Module:
        """Return the model that has the adapters."""
        ...


@runtime_checkable
class _Embeds(Protocol):
    """A language model of transformers."""

    def get_input_embeddings(self) -> nn.Module | None: ...
    def get_output_embeddings(self) -> nn.Module | None: ...


@runtime_checkable
class _Quantized(Protocol):
    """A transformers model that may be quantized."""

    is_quantized: bool


def saves_itself(model: nn.Module) -> bool:
    """Return whether the model files are written by ``model.save_pretrained``, as in transformers' Trainer.

    Other models that have such a method may write anything, so that their weights are written by name.
    """
    return _is_from("transformers.modeling_utils", "PreTrainedModel", model) or _is_from(
        "peft.peft_model", "PeftModel", model
    )


def has_adapters(model: nn.Module) -> bool:
    """Return whether ``model.save_pretrained`` writes only adapters."""
    return saves_itself(model) and isinstance(model, _Adapted)


def _is_from(module: str, name: str, model: nn.Module) -> bool:
    # The class of an existing object has been imported; importing the library to ask would take seconds.
    return module in sys.modules and isinstance(model, getattr(sys.modules[module], name))


# ---- saving ----------------------------------------------------------------------------------------------------------


def trained_state(model: nn.Module, state: Mapping[str, Any], *, optimized: Collection[int] = ()) -> dict[str, Any]:
    """Return the entries of ``state`` that training can change: everything but the frozen weights of the base model.

    Args:
        optimized: ids of the optimizer's parameters, which may be frozen now but have been trained.
    """
    adapters = _adapters_of(model)
    parameters = plain_names(dict(model.named_parameters(remove_duplicate=False)))
    left_out = {
        name
        for name, parameter in parameters.items()
        if not (parameter.requires_grad or id(parameter) in optimized or _is_in(name, adapters))
    } | _packed_weights(model)
    # Quantized weights have further entries, such as weight.absmax.
    return {name: value for name, value in state.items() if not left_out & {name, *_parents(name)}}


def embedding_names(model: nn.Module) -> set[str]:
    """Return the names of the weights of a language model's embeddings."""
    base = model.get_base_model() if isinstance(model, _Wrapper) else model
    if not isinstance(base, _Embeds):
        return set()
    found = (module for module in (base.get_input_embeddings(), base.get_output_embeddings()) if module is not None)
    owned = {id(parameter) for module in found for parameter in module.parameters()}
    named = plain_names(dict(model.named_parameters(remove_duplicate=False)))
    return {name for name, parameter in named.items() if id(parameter) in owned}


def warn_of_weights_outside(model: nn.Module, trained: Mapping[str, Any], folder: Path) -> bool:
    """Warn if the adapters' files in ``folder`` lack weights or buffers that training changes; return whether they do."""
    adapters = _adapters_of(model)
    files = [
        path for adapter_folder in _adapter_folders(folder).values() for path in adapter_folder.glob("*.safetensors")
    ]
    written = {name for path in files for name in _names_in(path)}
    outside = [
        name
        for name, value in trained.items()
        if not _is_in(name, adapters)
        and not written & {name, f"base_model.model.{name}"}
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
    ]
    if outside:
        warn(
            _(
                "{names} can change in training, but belong to no adapter, so peft does not write them "
                "to its files. Checkpoints hold them in {echelon_weights}; files written by save_model() "
                "do not. To make them part of the adapter, list their modules in modules_to_save of the "
                "PEFT configuration",
                names=shortened(outside),
                echelon_weights=ECHELON_WEIGHTS,
            )
        )
    return bool(outside)


def _adapters_of(model: nn.Module) -> Collection[str]:
    return model.peft_config.keys() if isinstance(model, _Adapted) else ()


def _is_in(name: str, adapters: Collection[str]) -> bool:
    """Return whether the tensor ``name`` belongs to one of ``adapters``, whose names are parts of their tensors' names."""
    return not set(adapters).isdisjoint(name.split("."))


def _parents(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _packed_weights(model: nn.Module) -> set[str]:
    """Return the names of buffers that hold a layer's quantized weights (GPTQ, AWQ), which training does not change."""
    if not (isinstance(model, _Quantized) and model.is_quantized):
        return set()
    packed = {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        if any(b.dim() > 1 and not b.is_floating_point() for b in module.buffers(recurse=False))
        for name, buffer in module.named_buffers(recurse=False)
    }
    return set(plain_names(packed))


def _names_in(path: Path) -> list[str]:
    with safetensors.safe_open(path, framework="pt") as file:
        return list(file.keys())


# ---- loading ---------------------------------------------------------------------------------------------------------


def holds_adapters(folder: Path) -> bool:
    """Return whether ``folder`` holds a model's adapters."""
    return (folder / ECHELON_WEIGHTS).is_file() or bool(_adapter_folders(folder))


def load_adapted_model(
    model: nn.Module, folder: Path, *, select: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
) -> None:
    """Load all that was trained into ``model``, whose base model has its weights already.

    Args:
        model: the unwrapped model, with the saved run's adapters.
        folder: a checkpoint, or a directory that ``save_pretrained`` wrote.
        select: returns the tensors of this rank's stages of a pipeline. None: ``model`` is whole.

    Raises:
        CheckpointError: the adapters differ from the model's.
    """
    path = folder / ECHELON_WEIGHTS
    if not path.is_file():
        _load_adapter_files(model, folder)
        return
    tensors = read_model([path])
    tensors = tensors if select is None else select(tensors)
    adapters, own = _adapters_of(model), set(plain_names(model.state_dict()))
    missing = sorted(name for name in own - tensors.keys() if _is_in(name, adapters))
    unexpected = sorted(tensors.keys() - own)
    if missing or unexpected:
        raise CheckpointError(
            f"{path} does not match the {type(model).__name__}: {listed({'missing': missing, 'unexpected': unexpected})}",
            do="give the model the same adapters, with the same names, as in the saved run",
        )
    load_weights(model, tensors, source=path, strict=False)


def _load_adapter_files(model: Any, folder: Path) -> None:
    """Load the files that peft or transformers wrote."""
    found, names = _adapter_folders(folder), list(_adapters_of(model))
    if len(found) == len(names) == 1:  # whatever its name was: peft does not store it
        found = dict(zip(names, found.values()))
    if found.keys() != set(names):
        raise CheckpointError(
            f"{folder} holds the adapters {', '.join(sorted(found))}, but the model has {', '.join(sorted(names))}",
            do="give the model the same adapters, with the same names, as in the saved run",
        )
    peft: Any = import_module("peft")
    for name, adapter_folder in found.items():
        weights = peft.load_peft_weights(str(adapter_folder), device="cpu")
        # Not load_adapter(), because a transformers model's own rejects an adapter that exists.
        result = peft.set_peft_model_state_dict(model, weights, adapter_name=name)
        if result.unexpected_keys and not model.peft_config[name].is_prompt_learning:
            raise CheckpointError(
                f"{adapter_folder} does not match the adapter {name!r}: {listed({'unexpected': result.unexpected_keys})}",
                do="give the model the same adapters, with the same settings, as in the saved run",
            )


def _adapter_folders(folder: Path) -> dict[str, Path]:
    """Return the folders with the adapters' files by adapter name; ``folder`` itself holds the adapter ``default``."""
    inside = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{_FILES}"))}
    return ({"default": folder} if any(folder.glob(_FILES)) else {}) | inside
