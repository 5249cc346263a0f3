"""Whatever accelerate 1.15.0 offers can be called in the same way: names, order and defaults of parameters.

``accelerate_names.json`` holds its signatures. Parameters of our own come after its, or by keyword only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from echelon.compat import unsupported
from tests.side_by_side.write_names import parameters
from tests.unit.compat.test_reexports import OMITTED

SIGNATURES: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[2] / "data" / "accelerate_names.json").read_text()
)["signatures"]

# What is different on purpose, and why.
DIFFERENT = {
    "accelerator:Accelerator": "split_batches=None is accelerate's sentinel object: the value of dataloader_config",
    "commands.config.default:write_basic_config": "the default place is echelon's own file",
    "data_loader:DataLoaderShard.adjust_state_dict_for_prefetch": "how accelerate corrects a count that is right here",
    "optimizer:AcceleratedOptimizer": "made by prepare() only: it steps through an engine",
    "optimizer:AcceleratedOptimizer.zero_grad": "True is what None means",
    "optimizer:move_to_device": "is send_to_device()",
    "scheduler:AcceleratedScheduler": "made by prepare() only",
    "scheduler:AcceleratedScheduler.get_lr": "every attribute of the wrapped scheduler is reached, this one too",
    "scheduler:AcceleratedScheduler.print_lr": "every attribute of the wrapped scheduler is reached, this one too",
    "utils.dataclasses:FullyShardedDataParallelPlugin.set_auto_wrap_policy": "the engine finds the classes in the model",
    "utils.dataclasses:FullyShardedDataParallelPlugin.set_cpu_offload": "a step of the constructor",
    "utils.dataclasses:FullyShardedDataParallelPlugin.validate_cpu_offload": "a step of the constructor",
    "utils.dataclasses:FullyShardedDataParallelPlugin.validate_mixed_precision_policy": "a step of the constructor",
}


def _ours(name: str) -> Any:
    """Return echelon's object of that name; None where this version does not offer it."""
    module, _, attribute = name.partition(":")
    owner, _, method = attribute.partition(".")
    if owner in OMITTED.get(module, (set(), ""))[0]:
        return None
    value = getattr(import_module(f"echelon.{module}"), owner)
    if any(value is getattr(unsupported, known) for known in unsupported.ALTERNATIVES):
        return None
    if isinstance(value, type):
        return getattr(value, method or "__init__", _missing)
    return value


def _missing() -> None:
    """Stand for a method that is not there."""


def _differences(theirs: list[str], ours: list[str]) -> Iterator[str]:
    def split(parameters: list[str]) -> tuple[list[str], set[str], set[str]]:
        star = next((i for i, text in enumerate(parameters) if text.startswith("*")), len(parameters))
        rest = set(parameters[star:]) - {"*"}
        return parameters[:star], {text for text in rest if not text.startswith("*")}, {t for t in rest if t[0] == "*"}

    positional, by_keyword, stars = split(theirs)
    our_positional, our_keyword, our_stars = split(ours)
    if our_positional[: len(positional)] != positional:
        yield f"{positional} became {our_positional}"
    if missing := by_keyword - our_keyword - set(our_positional):
        yield f"without {sorted(missing)}"
    if {s.count("*") for s in stars} - {s.count("*") for s in our_stars}:
        yield f"takes no {' '.join(stars)}"
    if needed := [text for text in [*our_positional[len(positional) :], *our_keyword] if "=" not in text]:
        yield f"needs {needed}"


def test_signatures_are_those_of_accelerate() -> None:
    found = {}
    for name, theirs in SIGNATURES.items():
        ours = _ours(name)
        if ours is _missing:
            found[name] = "missing"
        elif ours is not None and (lines := list(_differences(theirs, parameters(ours)))):
            found[name] = "; ".join(lines)
    assert found.keys() == DIFFERENT.keys(), found
