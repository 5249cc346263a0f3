"""Trackers of services and of TensorBoard: what they are given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from echelon.base.errors import MissingExtraError, UsageError
from echelon.trackers import (
    LOGGER_TYPE_TO_CLASS,
    ClearMLTracker,
    DVCLiveTracker,
    LoggerType,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
)


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", sorted(set(LoggerType.list()) - {"all"}))
def test_every_built_in_tracker_that_is_missing_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def missing(module: str) -> Any:
        raise ModuleNotFoundError(module, name=module.partition(".")[0])

    monkeypatch.setattr("echelon.base.optional.import_module", missing)
    make = LOGGER_TYPE_TO_CLASS[name]
    tracker = make("run", tmp_path) if make.requires_logging_directory else make("run")
    with pytest.raises(MissingExtraError, match=rf"log_with='{name}' requires[\s\S]*pip install \"{name}>="):
        tracker.start()


def test_tensorboard_event_files_hold_what_was_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed: make test installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker("run", tmp_path, flush_secs=5)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "model": {"size": "s", "depth": 3}, "api_key": "planted"})
    tracker.log(
        {"loss": torch.tensor(0.5), "note": "hello", "both": {"a": np.float32(1), "b": 2}, "odd": [1, 2]}, step=3
    )
    tracker.log({"loss": 0.25, "odd": [1, 2]}, step=4)
    tracker.log_images({"image": np.zeros((1, 3, 2, 2), dtype=np.float32)}, step=4)
    tracker.finish()

    def read(folder: Path) -> Any:
        events = EventAccumulator(str(folder))
        events.Reload()
        return events

    events = read(tmp_path / "run")
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5), (4, 0.25)]
    assert events.Tensors("note/text_summary")[0].tensor_proto.string_val[0] == b"hello"
    assert [(e.step, e.width) for e in events.Images("image")] == [(4, 2)]
    assert [(e.step, e.value) for e in read(tmp_path / "run" / "both_b").Scalars("both")] == [(3, 2.0)]
    (settings,) = (tmp_path / "run").glob("*/hparams.yml")
    assert settings.read_text() == "api_key: (hidden)\nlr: 0.1\nmodel:\n  depth: 3\n  size: s\n"
    assert [m for m in caplog.messages if "odd" in m] == [
        "TensorBoard accepts a number, a string or a dict of numbers; 'odd' is of type list and is not logged"
    ]


class _Calls:
    """Stands for any object of a service: notes every call under its dotted name."""

    def __init__(self, log: list[Any], name: str = "") -> None:
        self._log = log
        self._name = name

    def __getattr__(self, name: str) -> _Calls:
        return _Calls(self._log, f"{self._name}.{name}".strip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> _Calls:
        self._log.append((self._name, *args, kwargs))
        return _Calls(self._log, self._name + "()")


def _fake(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    monkeypatch.setattr("echelon.base.optional.import_module", lambda name: modules[name.replace(".", "_")])


def test_wandb_gets_scalars_and_its_own_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    _fake(monkeypatch, wandb=_Calls(calls))
    tracker = WandBTracker("project", mode="offline")
    assert tracker.tracker is None
    tracker.start()
    tracker.store_init_configuration({"lr": torch.tensor(0.5), "token": "planted"})
    histogram = torch.zeros(3)
    tracker.log({"loss": torch.tensor(0.5), "weights": histogram}, step=2, commit=False)
    tracker.finish()
    assert calls[0] == ("init", {"project": "project", "mode": "offline"})
    assert calls[1] == ("init().config.update", {"lr": 0.5, "token": "(hidden)"}, {"allow_val_change": True})
    name, values, options = calls[2]
    assert (name, values["loss"], values["weights"] is histogram) == ("init().log", 0.5, True)
    assert options == {"step": 2, "commit": False}
    assert calls[3][0] == "init().finish"


def test_mlflow_parameters_go_in_batches_and_metrics_are_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    mlflow = _Calls(calls)
    mlflow.search_experiments = lambda **_: []  # type: ignore[method-assign, assignment]
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=10, MAX_PARAMS_TAGS_PER_BATCH=2)
    _fake(monkeypatch, mlflow=mlflow, mlflow_utils_validation=limits)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-env")
    monkeypatch.setenv("MLFLOW_TAGS", '{"a": "b"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    tracker = MLflowTracker("given")
    tracker.start()
    tracker.store_init_configuration({"a": 1, "b": 2, "c": 3, "long": "x" * 11})
    tracker.log({"loss": np.float64(0.5), "text": "no"}, step=1)
    by_name: dict[str, Any] = {}
    for name, *rest in calls:
        by_name.setdefault(name, []).append(rest)
    assert by_name["create_experiment"][0][0] == {"name": "from-env", "artifact_location": None, "tags": {"a": "b"}}
    assert by_name["start_run"][0][0]["nested"] is True
    assert [args[0] for args in by_name["log_params"]] == [{"a": 1, "b": 2}, {"c": 3}]
    assert by_name["log_metrics"] == [[{"loss": 0.5}, {"step": 1}]]
    assert len(caplog.messages) == 2
    assert not any("xxx" in message for message in caplog.messages)


def test_clearml_splits_names_and_does_not_close_an_existing_task(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    _fake(monkeypatch, clearml=_Calls(calls))
    tracker = ClearMLTracker("run")
    tracker.start()  # Task.current_task() gives one
    tracker.log({"eval_loss": 1.0, "lr": 0.1}, step=5)
    tracker.log({"best": 2})
    with pytest.raises(UsageError, match="needs data or dataframe"):
        tracker.log_table("t")
    tracker.log_table("train_t", columns=["a"], data=[[1]], step=5)
    tracker.finish()
    said = [(name.rpartition(".")[2], rest[-1]) for name, *rest in calls]
    assert ("report_scalar", {"title": "loss", "series": "eval", "value": 1.0, "iteration": 5}) in said
    assert ("report_scalar", {"title": "lr", "series": "train", "value": 0.1, "iteration": 5}) in said
    assert ("report_single_value", {"name": "best", "value": 2}) in said
    assert ("report_table", {"title": "t", "series": "train", "table_plot": [["a"], [1]], "iteration": 5}) in said
    assert "close" not in dict(said)


def test_dvclive_sets_the_step_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    live = _Calls(calls, "live")
    _fake(monkeypatch, dvclive_plots=SimpleNamespace(Metric=SimpleNamespace(could_log=lambda value: value != [1])))
    tracker = DVCLiveTracker("ignored", live=live)
    tracker.start()
    tracker.log({"loss": torch.tensor(0.5), "odd": [1]}, step=7)
    tracker.finish()
    assert live.step == 7
    assert [call[0] for call in calls] == ["live.log_metric", "live.next_step", "live.end"]
    assert calls[0][1:3] == ("loss", 0.5)


@pytest.mark.parametrize("name", ["comet_ml", "aim", "swanlab", "trackio"])
def test_the_other_services_get_the_run_and_plain_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class _Service(_Calls):
        __hash__ = None  # type: ignore[assignment]

        def __setitem__(self, key: str, value: Any) -> None:
            self._log.append((f"{self._name}[{key}]", value, {}))

        def __getattr__(self, attribute: str) -> Any:
            return _Service(self._log, f"{self._name}.{attribute}".strip("."))

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self._log.append((self._name, *args, kwargs))
            return _Service(self._log, self._name + "()")

    calls: list[Any] = []
    _fake(monkeypatch, **{name: _Service(calls)})
    make = LOGGER_TYPE_TO_CLASS[name]
    tracker = make("run", "folder") if make.requires_logging_directory else make("run")
    tracker.start()
    tracker.store_init_configuration({"lr": torch.tensor(0.5), "api_key": "planted"})
    tracker.log({"loss": torch.tensor(0.25)}, step=3)
    tracker.finish()
    text = repr(calls)
    assert "'run'" in text or name == "aim"  # Aim's name is set as an attribute
    assert "0.5" in text
    assert "0.25" in text
    assert "3" in text
    assert "planted" not in text
    assert "tensor(" not in text
