"""echelon.ray.run with a stand-in for Ray, which is not installed here: what it is given, and what is told. (tests/clusters runs Ray.)"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import echelon.ray
from echelon.base.errors import LaunchError, MissingExtraError, UsageError
from echelon.base.warnings import EchelonWarning

PAGE = Path(__file__).resolve().parents[3] / "docs" / "clusters.md"


@dataclass
class ScalingConfig:
    num_workers: int
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None


@dataclass
class Result:
    return_value: object


class TrainingFailedError(RuntimeError):
    worker_failures: dict[int, BaseException]


@dataclass
class Site:
    """Ray's TorchTrainer, with one worker that is this process, in another folder."""

    scratch: Path
    given: dict[str, Any] = field(default_factory=dict)
    failure: TrainingFailedError | None = None

    def trainer(self, fn: Callable[[], object], **given: Any) -> Site:
        self.given = {"fn": fn, **given}
        return self

    def fit(self) -> Result:
        if self.failure is not None:
            raise self.failure
        before = os.getcwd()
        os.chdir(self.scratch)
        try:
            return Result(self.given["fn"]())
        finally:
            os.chdir(before)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path / "scratch")
    found.scratch.mkdir()
    modules: dict[str, dict[str, object]] = {
        "ray": {},
        "ray.train": {"ScalingConfig": ScalingConfig, "TrainingFailedError": TrainingFailedError},
        "ray.train.torch": {"TorchTrainer": found.trainer, "TorchConfig": lambda backend: backend},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "program").mkdir()
    monkeypatch.chdir(tmp_path / "program")
    return found


def test_the_error_for_missing_ray_shows_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=re.escape('pip install "ray[train]>=2.60"')):
        echelon.ray.run(print, num_workers=2)


def test_the_function_runs_in_the_folder_of_the_program(site: Site, tmp_path: Path) -> None:
    result = echelon.ray.run(lambda: os.getcwd(), num_workers=2)
    assert result.return_value == str(tmp_path / "program")
    assert site.given["scaling_config"] == ScalingConfig(2)
    result = echelon.ray.run(
        lambda config: config["lr"], config={"lr": 3}, num_workers=1, use_gpu=True, resources_per_worker={"GPU": 2}
    )
    assert result.return_value == 3
    assert site.given["scaling_config"] == ScalingConfig(1, True, {"GPU": 2})
    assert site.given["torch_config"] == "cpu:gloo,cuda:nccl"


def test_a_machine_without_the_folder_is_reported(site: Site, tmp_path: Path) -> None:
    echelon.ray.run(os.getcwd, num_workers=1)
    (tmp_path / "program").rmdir()
    os.chdir(tmp_path)
    with pytest.warns(
        EchelonWarning, match=".*/program does not exist on this machine, so relative paths are resolved"
    ):
        site.fit()


def test_options_of_ray_are_forwarded(site: Site) -> None:
    config = ScalingConfig(4)
    echelon.ray.run(os.getcwd, config, run_config="mine", datasets={"a": 1})
    assert site.given["scaling_config"] is config
    assert (site.given["run_config"], site.given["datasets"], "torch_config" in site.given) == ("mine", {"a": 1}, False)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "neither a ScalingConfig nor num_workers"),
        ({"scaling_config": ScalingConfig(2), "num_workers": 2}, "a ScalingConfig and num_workers"),
        (
            {"scaling_config": ScalingConfig(2), "use_gpu": True},
            "use_gpu and resources_per_worker cannot be combined with a ScalingConfig",
        ),
    ],
)
def test_the_number_of_workers_may_be_given_once(site: Site, given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        echelon.ray.run(print, **given)


def test_the_failing_rank_is_named(site: Site) -> None:
    site.failure = TrainingFailedError("Training failed due to worker errors")
    site.failure.worker_failures = {
        1: RuntimeError("Connection closed by peer [127.0.0.1]:2"),  # of rank 3, that is
        3: ValueError("no data"),
    }
    with pytest.raises(LaunchError, match="rank 3 failed with ValueError: no data; 1 other ranks also failed"):
        echelon.ray.run(print, num_workers=4)
    site.failure.worker_failures = {}
    with pytest.raises(LaunchError, match="Ray could not run the training function: Training failed"):
        echelon.ray.run(print, num_workers=4)


def test_the_example_of_the_document_trains(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python ray\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    exec(compile(found[1], str(PAGE), "exec"), {"__name__": "__main__"})
    loss = re.fullmatch(r"loss (0\.\d+)\n", capsys.readouterr().out)
    assert loss is not None
    assert 0 < float(loss[1]) < 1
