"""The recorded calls and the tables of names are those of the installed transformers."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.compat.transformers_names import ARGUMENTS_MEMBERS, HANDLER_MEMBERS, TRAINER_MEMBERS
from tests.side_by_side.run import PEERS, ROOT
from tests.side_by_side.trainer_calls import DATA

LIBRARY = next((PEERS.parents[1] / "lib").glob("python*"), Path("none")) / "site-packages" / "transformers"
NEEDS_DATASETS = "train_on_a_table"

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason=f"NOT COMPARED with transformers: there is no {LIBRARY} (make peers)"
)


def members(module: str, name: str) -> Iterator[str]:
    tree = ast.parse((LIBRARY / f"{module}.py").read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in kind.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
    for inner in ast.walk(kind):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            yield inner.attr


@pytest.mark.parametrize(
    ("table", "module", "name"),
    [
        (TRAINER_MEMBERS, "trainer", "Trainer"),
        (ARGUMENTS_MEMBERS, "training_args", "TrainingArguments"),
        (HANDLER_MEMBERS, "trainer_callback", "CallbackHandler"),
    ],
)
def test_the_tables_of_names_are_those_of_transformers(table: frozenset[str], module: str, name: str) -> None:
    """Among them ``_get_dataloader``, ``_remove_unused_columns``, ``_get_collator_with_removed_columns`` and
    ``_set_signature_columns_if_needed``.
    """
    assert {found for found in members(module, name) if not (found.startswith("__") and found.endswith("__"))} == table


def test_the_recorded_calls_are_those_of_transformers() -> None:
    program = [str(PEERS), str(ROOT / "tests" / "side_by_side" / "trainer_calls.py")]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, env=environ, check=True)
    found = json.loads(done.stdout[done.stdout.index('{\n "transformers"') :])
    recorded = json.loads(DATA.read_text())
    if NEEDS_DATASETS not in found["calls"]:  # the peers have no datasets
        del recorded["calls"][NEEDS_DATASETS]
    assert found == recorded
