"""Defects of accelerate 1.15.0, and the correct behavior of echelon: `defects/`, with only the import changed.

Each value is asserted for both libraries, so that a row is removed when accelerate is fixed. Without accelerate, the tests listed
in TESTS check echelon.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.side_by_side.run import HERE, ROOT, Forks, Run

_NO_ATTRIBUTE = "AttributeError: 'DataLoader' object has no attribute 'total_batch_size'"

# (script, processes): the values of accelerate, and those of echelon, by name, or by "rank name" if the ranks differ.
EXPECTED: dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]] = {
    ("01_launch_cpu", 1): ({"exit code": 0, "processes": 1}, {"exit code": 0, "processes": 2}),
    ("02_notebook_precision", 1): (
        {"on two processes": ["no", "no"], "on one process": "no", "a wrong value": "AttributeError"},
        {"on two processes": ["bf16", "bf16"], "on one process": "bf16", "a wrong value": "ConfigError"},
    ),
    ("03_join_uneven_inputs", 2): (
        {"0 ended": "in an error of the process group", "0 steps": 2, "1 ended": "well", "1 steps": 2},
        {"0 ended": "well", "0 steps": 3, "1 ended": "well", "1 steps": 2},
    ),
    ("04_two_accelerators", 1): (
        {"steps of the first": 1, "steps of the second": 1},
        {"steps of the first": 4, "steps of the second": 1},
    ),
    ("05_break", 1): ({"in a loader after break": True}, {"in a loader after break": False}),
    ("06_dispatcher", 2): (
        {"total_batch_size": _NO_ATTRIBUTE, "batches of nothing": "TypeError"},
        {"total_batch_size": 4, "batches of nothing": 0},
    ),
    ("07_dynamo_backend", 1): (
        {"the library knows it": True, "launch": "refused as an invalid choice"},
        {"the library knows it": True, "launch": "starts"},
    ),
    ("08_metrics_of_a_stream", 2): (
        {"samples": 16, "seen": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5]},
        {"samples": 10, "seen": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]},
    ),
    ("09_metrics_of_a_sampler", 2): (
        {"samples": [0, 1, 4, 9, 16, 0, 1, 4], "samples of a part": [0, 1, 2, 3, 4, 0, 1, 2]},
        {"samples": [0, 1, 4, 9, 16], "samples of a part": [0, 1, 2, 3, 4]},
    ),
    ("10_environment_beats_code", 1): (
        {"steps": 8, "steps without code": 8},
        {"steps": 2, "steps without code": 8},
    ),
    ("11_last_window", 1): (
        {"gradient of a mean of ones": 1.0, "gradient of a mean of ones#2": 0.25},
        {"gradient of a mean of ones": 1.0, "gradient of a mean of ones#2": 1.0},
    ),
    ("12_zero_grad_first", 1): (
        {"gradient of a mean of two": 1.0, "gradient of a mean of two#2": 2.0},
        {"gradient of a mean of two": 1.5, "gradient of a mean of two#2": 3.5},
    ),
}

# The tests of the correct behavior that do not need accelerate.
TESTS = {
    "01_launch_cpu": "launch/test_launch.py::test_every_process_asked_for_runs",
    "02_notebook_precision": "launch/test_notebook.py::test_what_the_ranks_print_is_shown_in_the_cell",
    "03_join_uneven_inputs": "ranks/engines/test_engine_contract.py::test_the_engine_contract",
    "04_two_accelerators": "ranks/accelerator/test_process.py::test_two_accelerators_have_separate_settings_and_windows",
    "05_break": "ranks/accelerator/test_data_loaders.py::test_the_last_batch_is_detected_and_an_aborted_pass_is_forgotten",
    "06_dispatcher": "ranks/data/test_loader_iterable.py::test_dispatched_samples_are_used_once_and_read_by_rank_zero_only",
    "07_dynamo_backend": "launch/test_launch.py::test_script_gets_its_arguments_untouched_and_its_environment",
    "08_metrics_of_a_stream": "ranks/data/test_loader_iterable.py::test_sharded_samples_are_read_exactly_once",
    "09_metrics_of_a_sampler": "ranks/accelerator/test_metrics.py::test_metrics_count_the_samplers_samples_not_the_datasets",
    "10_environment_beats_code": "ranks/accelerator/test_accelerator.py::test_code_overrides_the_environment_with_a_message",
    "11_last_window": "ranks/accelerator/test_accelerator.py::test_one_process_follows_a_plain_loop_bit_for_bit",
    "12_zero_grad_first": "ranks/accelerator/test_accelerator.py::test_the_update_equals_that_of_one_large_batch",
}


def _values(run: Run, names: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``run`` with the names in EXPECTED; equal values of all ranks are merged."""
    if any(name[0].isdigit() for name in names):
        return run.values
    found: dict[str, Any] = {}
    for key, value in run.values.items():
        assert found.setdefault(key.split(" ", 1)[1], value) == value, f"the ranks differ: {run.values}"
    return found


@pytest.mark.parametrize(("name", "world_size"), EXPECTED)
def test_accelerate_has_the_defect_and_echelon_does_not(forks: dict[str, Forks], name: str, world_size: int) -> None:
    for package, expected in zip(("accelerate", "echelon"), EXPECTED[name, world_size]):
        run = forks[package].run(HERE / "defects" / f"{name}.py", world_size)
        assert run.codes == [0] * world_size, run.output
        assert _values(run, expected) == expected, f"{package}: {run.output}"


def test_each_defect_has_a_test_without_accelerate() -> None:
    scripts = sorted(path.stem for path in (HERE / "defects").glob("*.py"))
    assert scripts == sorted(TESTS) == sorted(name for name, _ in EXPECTED)
    for test in TESTS.values():
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body), test
