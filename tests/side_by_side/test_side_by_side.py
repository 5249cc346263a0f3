"""Scripts written for accelerate print the same on echelon, with only the import changed."""

from __future__ import annotations

import pytest

from tests.side_by_side.coverage import BEHAVIOURS, NAMES, uses
from tests.side_by_side.differences import DIFFERENCES
from tests.side_by_side.run import HERE, PACKAGES, SCRIPTS, WORLD_SIZES, Forks, compare, with_package


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_prints_the_same(forks: dict[str, Forks], name: str, world_size: int) -> None:
    theirs, ours = (forks[package].run(HERE / "scripts" / f"{name}.py", world_size) for package in PACKAGES)
    assert theirs.codes == [0] * world_size, theirs.output
    assert ours.codes == [0] * world_size, ours.output
    assert theirs.values, "nothing was printed"
    assert compare(theirs.values, ours.values, DIFFERENCES.get((name, world_size), {})) == []
    if world_size == 2:
        printed = {key.split(" ", 1)[1] for key in ours.values}
        assert [value for script, value in BEHAVIOURS.values() if script == name and value not in printed] == []


def test_the_scripts_use_every_name_between_them() -> None:
    used = set().union(*(uses(HERE / "scripts" / f"{name}.py") for name in SCRIPTS))
    assert [name for names in NAMES.values() for name in names if name not in used] == []
    assert [script for script, _ in BEHAVIOURS.values() if script not in SCRIPTS] == []
    assert [key for key in DIFFERENCES if key[0] not in SCRIPTS or key[1] not in WORLD_SIZES] == []


def test_only_import_lines_change() -> None:
    source = "from accelerate.utils import gather\nimport accelerate\nname = 'accelerate'  # import accelerate\n"
    assert with_package(source, "echelon") == (
        "from echelon.utils import gather\nimport echelon\nname = 'accelerate'  # import accelerate\n"
    )


def test_a_value_that_differs_or_is_missing_is_found() -> None:
    assert compare({"0 a": 1.0}, {"0 a": 1.0 + 1e-7}, {}) == []
    assert compare({"0 a": [1.0]}, {"0 a": [1.00001]}, {}) == ["0 a: accelerate [1.0], echelon [1.00001]"]
    assert compare({"0 a": 1}, {"0 a": True}, {}) == ["0 a: accelerate 1, echelon True"]
    assert compare({"0 a": 1, "1 a": 1}, {"0 a": 1}, {}) == ["1 a: printed by accelerate only"]
    known = DIFFERENCES["02_process_facts", 2]
    assert compare(
        {"0 device": "cpu", "0 state.device": "cpu:0"}, {"0 device": "cpu", "0 state.device": "cpu"}, known
    ) == ["0 device: accelerate 'cpu', echelon 'cpu', and not the known difference 'cpu:0', 'cpu'"]
    assert compare({}, {}, {"device": known["device"]}) == ["device: a known difference that was not printed"]
