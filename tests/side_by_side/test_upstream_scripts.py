"""accelerate 1.15.0's own test scripts pass on echelon, except for the functions in upstream_exceptions.yaml."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import RanksFailed, run_on_ranks
from tests.side_by_side.upstream import SCRIPTS, Call, calls, folder_of_accelerate, run

FOLDER = folder_of_accelerate()
CALLS = [call for script in SCRIPTS for call in calls(FOLDER, script)] if FOLDER else []
EXCEPTIONS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("upstream_exceptions.yaml").read_text())


def _exception(call: Call, world_size: int) -> dict[str, Any] | None:
    found = [
        entry
        for entry in EXCEPTIONS
        if call.script == entry["script"]
        and call.function in entry["functions"]
        and world_size in entry["processes"]
        and entry.get("arguments", {}).items() <= call.arguments.items()
    ]
    assert len(found) <= 1, f"{call} on {world_size} has two exceptions"
    return found[0] if found else None


def test_accelerate_1_15_is_installed() -> None:
    if FOLDER is None:
        text = "accelerate's scripts were NOT run: there is no .venv-peers (make peers)"
        if os.environ.get("REQUIRE_PEERS") == "1":
            pytest.fail(text)
        pytest.skip(text)
    assert (FOLDER.parent / "accelerate-1.15.0.dist-info").is_dir()


def test_every_exception_names_a_function_of_a_script() -> None:
    if FOLDER is None:
        pytest.skip("there is no .venv-peers (make peers)")
    for entry in EXCEPTIONS:
        assert entry["reason"], entry
        for function in entry["functions"]:
            of_it = [call for call in CALLS if (call.script, call.function) == (entry["script"], function)]
            assert any(_exception(call, n) is entry for call in of_it for n in entry["processes"]), (function, entry)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_script_of_accelerate_passes(call: Call, world_size: int, tmp_path: Path) -> None:
    if call.function == "test_split_between_processes_dataset" and find_spec("datasets") is None:
        pytest.skip("Hugging Face datasets is not installed (in that case the script's own main() skips this, too)")
    is_main = call.function == "main"
    excepted = {other.function for other in CALLS if other.script == call.script and _exception(other, world_size)}
    options = {
        "inside": tmp_path,
        "without": excepted - {"main"} if is_main else (),
        "world_size": world_size,
        "init_group": world_size > 1 and not is_main,  # a main() creates and destroys its own group
        "timeout": 120,
    }
    entry = _exception(call, world_size)
    if entry is None:
        run_on_ranks(run, FOLDER, call, **options)
        return
    with pytest.raises(RanksFailed) as caught:  # a function that passes must not be in the list
        run_on_ranks(run, FOLDER, call, **options)
    assert re.search(entry["error"], str(caught.value)), f"it failed in an unexpected way:\n{caught.value}"
    pytest.xfail(entry["reason"])
