"""Trackers: what they write, which of them there are, and what never gets into a log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.tracking import Tracking
from echelon.base.warnings import EchelonWarning
from echelon.trackers import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    JSONLTracker,
    LoggerType,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    read_records,
    register_tracker_class,
)


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _registry() -> Iterator[None]:
    before = GeneralTracker.registered
    yield
    GeneralTracker.registered = before


class Recorder(GeneralTracker):
    """Notes its calls."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, run_name: str, **options: Any) -> None:
        super().__init__()
        self.calls: list[Any] = [("init", run_name, options)]

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("log", values, step, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


# ---- the interface -------------------------------------------------------------------------------------------------


def test_a_tracker_without_its_attributes_is_rejected_with_their_names() -> None:
    class Empty(GeneralTracker):
        pass

    class NoTracker(GeneralTracker):
        name = "x"
        requires_logging_directory = False

    with pytest.raises(NotImplementedError, match="`name`, `requires_logging_directory`, `tracker`"):
        Empty()
    with pytest.raises(NotImplementedError, match="NoTracker does not define `tracker`"):
        NoTracker()


@pytest.mark.parametrize(("main_only", "logged"), [(True, 0), (False, 1)])
def test_main_process_only_decides_which_ranks_log(
    monkeypatch: pytest.MonkeyPatch, main_only: bool, logged: int
) -> None:
    monkeypatch.setenv("RANK", "1")
    recorder = Recorder("run")
    recorder.main_process_only = main_only
    recorder.log({"a": 1})
    assert len(recorder.calls) - 1 == logged


# ---- which there are -----------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"log_with='tensorbord' is not a known tracker[\s\S]*tensorboard"):
        filter_trackers("tensorbord")


def test_missing_trackers_are_skipped_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.trackers.registry.is_available", lambda name: name == "wandb")
    with pytest.warns(EchelonWarning, match='pip install "mlflow>='):
        assert filter_trackers(["mlflow", "wandb", LoggerType.WANDB]) == [LoggerType.WANDB]
    assert get_available_trackers() == [LoggerType.WANDB]


def test_all_means_every_installed_one_after_the_given_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.trackers.registry.is_available", lambda name: name in ("wandb", "tensorboard"))
    recorder = Recorder("run")
    assert filter_trackers(["all", recorder], "logs") == [recorder, LoggerType.TENSORBOARD, LoggerType.WANDB]
    assert filter_trackers(LoggerType.ALL) == [LoggerType.WANDB]  # there is no folder for the other one


def test_a_tracker_of_files_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.trackers.registry.is_available", lambda name: True)
    with pytest.raises(ValueError, match="log_with='tensorboard' needs a logging directory"):
        filter_trackers("tensorboard")


@pytest.mark.usefixtures("_registry")
def test_a_registered_class_is_used_by_name_and_can_be_replaced() -> None:
    register_tracker_class(Recorder)
    assert filter_trackers(["recorder", "recorder"]) == ["recorder"]
    assert LOGGER_TYPE_TO_CLASS["recorder"] is Recorder

    class Other(Recorder):
        pass

    with pytest.warns(EchelonWarning, match="'recorder' is already registered; Other replaces it"):
        register_tracker_class(Other)
    assert LOGGER_TYPE_TO_CLASS["recorder"] is Other


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (int, "not a subclass of GeneralTracker"),
        (Recorder("x"), "not a subclass of GeneralTracker"),
        (type("A", (GeneralTracker,), {}), "A has no 'name'"),
        (type("B", (GeneralTracker,), {"name": ""}), "B has no 'name'"),
        (type("C", (GeneralTracker,), {"name": "c"}), "C has no 'requires_logging_directory'"),
    ],
)
def test_invalid_registrations_raise(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        register_tracker_class(given)


# ---- JSONL ---------------------------------------------------------------------------------------------------------


def test_each_line_is_in_the_file_at_once_and_keeps_its_types(tmp_path: Path) -> None:
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.log(
        {
            "loss": torch.tensor(0.5),
            "accuracy": np.float32(0.25),
            "epoch": np.int64(3),
            "one": torch.tensor([7]),
            "text": "caf\u00e9",
            "flag": True,
            "nothing": None,
            "nested": {"a": torch.tensor([1.0, 2.0])},
            "bad": float("nan"),
            "big": torch.tensor(float("-inf")),
        },
        step=4,
    )
    (line,) = tracker.path.read_text(encoding="utf-8").splitlines()
    record = json.loads(line, parse_constant=lambda text: pytest.fail(f"not JSON: {text}"))
    assert (record["kind"], record["step"]) == ("metrics", 4)
    assert type(record["time"]) is float
    assert record["values"] == {
        "loss": 0.5, "accuracy": 0.25, "epoch": 3, "one": 7, "text": "caf\u00e9", "flag": True, "nothing": None,
        "nested": {"a": [1.0, 2.0]}, "bad": {"float": "nan"}, "big": {"float": "-inf"},
    }  # fmt: skip
    (read,) = read_records(tracker.path)
    assert math.isnan(read["values"]["bad"])
    assert read["values"]["big"] == -math.inf
    tracker.finish()


def test_a_resumed_run_appends_even_after_a_truncated_line(tmp_path: Path) -> None:
    for number in (1, 2):
        tracker = JSONLTracker("run", tmp_path)
        tracker.start()
        tracker.log({"x": number}, step=number)
        tracker.finish()
        with tracker.path.open("a") as file:
            file.write('{"kind": "metr')
    assert [record["values"] for record in read_records(tracker.path)] == [{"x": 1}, {"x": 2}]


def test_no_other_rank_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.log({"x": 1})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_secrets_are_not_stored_in_the_settings(tmp_path: Path) -> None:
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.store_init_configuration(
        {
            "lr": 0.1, "hub_token": "planted", "nested": {"api_key": "planted", "DB_PASSWORD": "planted"}, "token": "planted",
            "client_secret": "planted", "aws_secret_access_key": "planted",
            "pad_token": "<pad>", "num_tokens": 5, "tokenizer": "bert", "max_new_tokens": 7, "key": "value",
        }
    )  # fmt: skip
    tracker.finish()
    assert "planted" not in tracker.path.read_text()
    (record,) = read_records(tracker.path)
    kept = {k: v for k, v in record["values"].items() if v != "(hidden)" and k != "nested"}
    assert kept == {"lr": 0.1, "pad_token": "<pad>", "num_tokens": 5, "tokenizer": "bert", "max_new_tokens": 7, "key": "value"}  # fmt: skip


# ---- all of one Accelerator ----------------------------------------------------------------------------------------


def test_a_project_folder_adds_a_jsonl_tracker(tmp_path: Path) -> None:
    recorder = Recorder("own")
    tracking = Tracking([recorder], ProjectConfiguration(project_dir=str(tmp_path)))
    assert isinstance(tracking.get_tracker("anything"), GeneralTracker)  # nothing has started
    tracking.init_trackers("run", {"lr": 0.1})
    tracking.log({"loss": torch.tensor(2.0)}, step=1, log_kwargs={"recorder": {"extra": True}})
    assert tracking.trackers == [recorder]
    assert tracking.get_tracker("recorder") is recorder
    assert tracking.get_tracker("recorder", unwrap=True) is recorder.calls
    with pytest.raises(ValueError, match=r"get_tracker\('wandb'\)[\s\S]*recorder, jsonl"):
        tracking.get_tracker("wandb")
    path = tracking.get_tracker("jsonl").path
    tracking.finish()
    tracking.finish()
    assert recorder.calls[1:] == ["start", ("config", {"lr": 0.1}), ("log", {"loss": torch.tensor(2.0)}, 1, {"extra": True}), "finish"]  # fmt: skip
    assert path == tmp_path / "run" / "metrics.jsonl"
    assert [(r["kind"], r["values"]) for r in read_records(path)] == [
        ("config", {"lr": 0.1}),
        ("metrics", {"loss": 2.0}),
    ]


@pytest.mark.usefixtures("_registry")
def test_init_kwargs_reach_their_tracker_and_misspelled_ones_are_reported() -> None:
    register_tracker_class(Recorder)
    tracking = Tracking("recorder", ProjectConfiguration())
    with pytest.warns(EchelonWarning, match="init_kwargs contains options for recoder, but log_with has recorder"):
        tracking.init_trackers("run", init_kwargs={"recorder": {"tags": ["a"]}, "recoder": {}})
    assert tracking.get_tracker("recorder").calls[0] == ("init", "run", {"tags": ["a"]})


def test_a_tracker_that_fails_to_finish_does_not_keep_the_others_open(tmp_path: Path) -> None:
    class Failing(Recorder):
        def finish(self) -> None:
            raise OSError("planted")

    tracking = Tracking([Failing("x")], ProjectConfiguration(project_dir=str(tmp_path)))
    tracking.init_trackers("run")
    file = tracking.get_tracker("jsonl", unwrap=True)
    with pytest.raises(OSError, match="planted"):
        tracking.finish()
    assert file.closed
