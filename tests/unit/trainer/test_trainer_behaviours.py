"""Behaviours of transformers' Trainer that scripts rely on without naming them, each by itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.base.errors import UsageError
from echelon.trainer import (
    DefaultFlowCallback,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from echelon.trainer.callbacks.trackers import run_folder
from echelon.trainer.data.columns import find_labels, kept_columns
from tests.trainer_models import DATA, Line, arguments


def _first_batch(trainer: Trainer) -> list[float]:
    rows: list[float] = next(iter(trainer.get_train_dataloader()))["x"].flatten().tolist()
    return rows


def test_a_seed_that_is_set_later_changes_nothing_of_the_order(tmp_path: Path) -> None:
    # In transformers the order depends on the state of torch when the loader is made.
    expected = [float(i) for i in torch.randperm(10, generator=torch.Generator().manual_seed(42)).tolist()[:2]]
    trainer = Trainer(Line(), arguments(tmp_path), train_dataset=DATA)
    torch.manual_seed(5)
    assert _first_batch(trainer) == expected
    sequential = arguments(tmp_path, train_sampling_strategy="sequential")
    assert _first_batch(Trainer(Line(), sequential, train_dataset=DATA)) == [0.0, 1.0]


def test_labels_are_found_by_their_names_also_inside_an_adapter(tmp_path: Path) -> None:
    def answer(input_ids: Any, start_positions: Any = None, end_positions: Any = None) -> None: ...

    def classify(input_ids: Any, next_sentence_label: Any = None, labels: Any = None) -> None: ...

    assert find_labels(answer) == ["start_positions", "end_positions"]
    assert find_labels(classify) == ["next_sentence_label", "labels"]

    class Adapter(nn.Module):
        """As PEFT's: it takes anything, and passes it on."""

        def __init__(self) -> None:
            super().__init__()
            self.inside = Line()

        def get_base_model(self) -> nn.Module:
            return self.inside

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inside(*args, **kwargs)

    trainer = Trainer(Adapter(), arguments(tmp_path), train_dataset=DATA, eval_dataset=DATA)
    assert trainer.label_names == ["labels"]
    assert not trainer.model_accepts_loss_kwargs
    kept = kept_columns(trainer.model, label_names=["labels"], own_loss=False)
    assert kept is not None
    assert [name for name in ("x", "labels", "text") if kept.keeps(name)] == ["x", "labels"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


class Pads:
    """A tokenizer, as far as a collator asks for one."""

    model_input_names = ["x"]

    def pad(self, features: Any, return_tensors: str = "pt", **options: Any) -> dict[str, torch.Tensor]:
        width = max(len(row["x"]) for row in features)
        rows = [F.pad(torch.tensor(row["x"]), (0, width - len(row["x"]))) for row in features]
        return {"x": torch.stack(rows), "label": torch.tensor([row["label"] for row in features])}


def test_a_tokenizer_pads_the_samples_and_without_one_they_are_stacked(tmp_path: Path) -> None:
    ragged = [{"x": [1.0] * n, "label": float(n)} for n in (1, 3)]
    args = arguments(tmp_path, train_sampling_strategy="sequential")
    batch = next(iter(Trainer(Line(), args, train_dataset=ragged, processing_class=Pads()).get_train_dataloader()))
    assert batch["x"].tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert batch["labels"].tolist() == [1.0, 3.0]
    plain = next(iter(Trainer(Line(), args, train_dataset=[{"x": [1.0], "label": 2}] * 2).get_train_dataloader()))
    assert plain["labels"].tolist() == [2, 2]


def test_outputs_that_the_config_leaves_out_are_no_predictions(tmp_path: Path) -> None:
    class Talkative(Line):
        config = SimpleNamespace(keys_to_ignore_at_inference=["hidden"])

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return {**super().forward(x, labels), "hidden": x, "more": x}

    trainer = Trainer(Talkative(), arguments(tmp_path), eval_dataset=DATA)
    logits, more = trainer.predict(DATA).predictions
    assert (logits.shape, more.shape) == ((10,), (10, 1))
    assert trainer.predict(DATA, ignore_keys=["hidden", "more"]).predictions.shape == (10,)


def test_an_evaluation_before_any_training_tells_how_long_the_model_took_to_prepare(tmp_path: Path) -> None:
    trainer = Trainer(Line(), arguments(tmp_path), train_dataset=DATA, eval_dataset=DATA)
    speed = {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert set(trainer.evaluate()) == speed | {"eval_model_preparation_time", "epoch"}  # epoch 0
    summary = trainer.train().metrics
    speeds = {f"train_{name}" for name in ("runtime", "samples_per_second", "steps_per_second", "loss")}
    assert set(summary) == speeds | {"total_flos", "epoch"}
    assert set(trainer.evaluate()) == speed | {"epoch"}


def test_results_unpack_and_index() -> None:
    result = EvalPrediction(1, 2, inputs=3)
    assert (*result, result[2]) == (1, 2, 3, 3)
    with pytest.raises(IndexError, match="index -1 is out of range"):
        result[-1]


def test_the_state_is_written_sorted_and_read_whatever_version_wrote_it(tmp_path: Path) -> None:
    state = TrainerState(global_step=3, log_history=[{"loss": 1.0, "step": 3}])
    state.save_to_json(tmp_path / "state.json")
    text = (tmp_path / "state.json").read_text()
    values = json.loads(text)
    assert text == json.dumps(values, indent=2, sort_keys=True) + "\n"
    (tmp_path / "newer.json").write_text(json.dumps({**values, "of_a_later_version": 1}))
    assert TrainerState.load_from_json(tmp_path / "newer.json") == state
    del values["best_global_step"]  # older ones have none
    (tmp_path / "older.json").write_text(json.dumps(values))
    assert TrainerState.load_from_json(tmp_path / "older.json") == state


def test_callbacks_are_called_in_their_order_and_one_may_return_another_control(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
            return TrainerControl(should_training_stop=True)

    trainer = Trainer(Line(), arguments(tmp_path), train_dataset=DATA, callbacks=[Stops])
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds == [DefaultFlowCallback, Stops, PrinterCallback]
    assert trainer.train().global_step == 1
    assert trainer.control.should_training_stop


def test_evaluations_wait_for_eval_delay_and_only_better_models_are_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_delay": 3,
        "metric_for_best_model": "loss",
    }
    options |= {"save_strategy": "best", "learning_rate": 0.1}  # every step makes the loss smaller
    for greater, expected in ((False, {3, 4, 5}), (True, {3})):
        folder = tmp_path / str(greater)
        trainer = Trainer(
            Line(), arguments(folder, greater_is_better=greater, **options), train_dataset=DATA, eval_dataset=DATA
        )
        trainer.train()
        assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [3, 4, 5]
        assert {path.name for path in folder.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in expected}


def test_callbacks_of_transformers_work(tmp_path: Path) -> None:
    theirs = pytest.importorskip("transformers")
    seen: list[int] = []

    class Looks(theirs.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            seen.append(state.global_step)
            return control

    args = arguments(
        tmp_path, learning_rate=0.0, eval_strategy="epoch", num_train_epochs=9, metric_for_best_model="loss",
        per_device_train_batch_size=10, save_strategy="epoch", load_best_model_at_end=True, save_total_limit=1,
    )  # fmt: skip
    stopping = theirs.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = Trainer(
        Line(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[Looks, stopping, theirs.PrinterCallback]
    )
    trainer.train()
    assert seen == [1, 2, 3]  # the first is the best, and two are not better
    assert "EarlyStoppingCallback" in trainer.state.stateful_callbacks


def test_a_model_without_a_head_is_told_what_has_one(tmp_path: Path) -> None:
    class NetModel(nn.Module):
        """As the bodies of transformers' models are."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        @property
        def base_model(self) -> nn.Module:
            return self

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"last_hidden_state": self.layer(x)}

    with pytest.raises(UsageError, match="NetForSequenceClassification"):
        Trainer(NetModel(), arguments(tmp_path), train_dataset=DATA).train()


def test_the_folder_of_the_trackers_can_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_folder(arguments(tmp_path)).parent == tmp_path / "runs"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "there")
    assert (
        run_folder(arguments(tmp_path)) == Path("there").resolve()
    )  # fixed when given: os.chdir does not split the run
