"""``make bench-check``: the comparison of the calls that echelon adds to a training step with the stored ones."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def hot_path(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("hot_path")


def test_more_than_five_percent_above_the_stored_count_fails(hot_path: Any) -> None:
    assert hot_path.exceeded({"level 2": 21.0, "level 3": 63.0}, {"level 2": 20.0, "level 3": 60.0}) == []
    assert hot_path.exceeded({"level 2": 21.25, "level 3": 63.0}, {"level 2": 20.0, "level 3": 60.0}) == [
        "level 2: 21.25 Python calls per step beyond the plain loop's, stored 20.0"
    ]


def test_below_the_plain_loop_a_step_may_also_not_lose_five_percent(hot_path: Any) -> None:
    assert hot_path.exceeded({"clipping": -19.0}, {"clipping": -20.0}) == []
    assert len(hot_path.exceeded({"clipping": -18.75}, {"clipping": -20.0})) == 1


def test_every_variant_has_a_stored_count(hot_path: Any) -> None:
    stored = json.loads((BENCHMARKS / "hot_path.json").read_text())
    levels = [name for name in hot_path.VARIANTS if not name.startswith("plain loop")]
    assert set(stored) == {*levels, *(f"{name}, recorded" for name in levels if "," not in name)}
    assert hot_path.exceeded({"level 2": 1.0}, {}) != []
