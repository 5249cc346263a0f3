"""What cannot work is an error that says what happened, where, and what to do."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from echelon.base.errors import CheckpointError, ConfigError, EchelonError, UsageError
from echelon.trainer import EarlyStoppingCallback, Trainer, TrainingArguments
from tests.trainer_models import Line

DATA = [{"x": torch.ones(1), "labels": torch.ones(())} for _ in range(4)]


class Bare(Line):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": self.layer(x).squeeze(-1)}


class OwnLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        y = model(inputs["x"])["logits"]
        loss = F.mse_loss(y, inputs["labels"])
        return (loss, y) if return_outputs else loss


class OneResult(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return F.mse_loss(model(inputs["x"])["logits"], inputs["labels"])


def _args(tmp_path: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), save_strategy="no", disable_tqdm=True, **options)


def _says(error: EchelonError, *, what: str, where: str, do: str) -> None:
    assert what in error.what
    assert where in (error.where or "")
    assert do in (error.do or "")


def test_neither_or_both_of_model_and_model_init(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        Trainer(args=_args(tmp_path))
    _says(error.value, what="either model or model_init, but got neither", where="Trainer(model", do="pass one of them")
    with pytest.raises(UsageError, match="but got both"):
        Trainer(Line(), _args(tmp_path), model_init=Line)


def test_an_optimizer_for_models_that_are_made_anew(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(Line().parameters())
    with pytest.raises(UsageError) as error:
        Trainer(args=_args(tmp_path), model_init=Line, optimizers=(optimizer, None))
    _says(error.value, what="optimizers= belongs to one model", where="optimizers=", do="pass model= instead of")


def test_two_optimizers(tmp_path: Path) -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="both define the optimizer"):
        Trainer(
            model, _args(tmp_path), optimizers=(optimizer, None), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1})
        )


def test_an_eval_strategy_without_an_eval_set(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        Trainer(Line(), _args(tmp_path, eval_strategy="epoch"), train_dataset=DATA)
    _says(
        error.value,
        what="eval_strategy='epoch', but there is no eval_dataset",
        where="eval_dataset",
        do="eval_strategy='no'",
    )


def test_nothing_to_train_or_evaluate_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        Trainer(Line(), _args(tmp_path)).train()
    _says(error.value, what="train_dataset is None", where="Trainer(train_dataset=)", do="pass train_dataset")
    with pytest.raises(UsageError) as error:
        Trainer(Line(), _args(tmp_path)).evaluate()
    _says(error.value, what="eval_dataset is None", where="Trainer.evaluate", do="pass eval_dataset")
    with pytest.raises(UsageError, match=r"no evaluation dataset 'three' \(available: \['one'\]\)"):
        Trainer(Line(), _args(tmp_path), eval_dataset={"one": DATA}).evaluate("three")
    with pytest.raises(UsageError, match=r"there is no batch to train on \(samples: 4\)"):
        Trainer(Line(), _args(tmp_path, dataloader_drop_last=True), train_dataset=DATA).train()


def test_a_label_column_is_missing(tmp_path: Path) -> None:
    rows = [{"x": torch.ones(1), "target_value": torch.ones(())} for _ in range(4)]
    with pytest.raises(UsageError) as error:
        Trainer(
            Line(), _args(tmp_path, remove_unused_columns=False), train_dataset=[{"x": row["x"]} for row in rows]
        ).train()
    _says(
        error.value,
        what="the model (Line) returned no loss, and the batch has no 'labels'; the batch has the columns x (label_names: labels)",
        where="Trainer.compute_loss",
        do="name the label column 'labels', or set label_names",
    )
    with pytest.raises(UsageError) as error:
        OwnLoss(Bare(), _args(tmp_path), train_dataset=rows).train()
    _says(
        error.value,
        what="compute_loss needs 'labels', but the batch has only x, target_value (label_names: labels)",
        where="Trainer.compute_loss",
        do="rename a dataset column, or set label_names",
    )
    with pytest.raises(UsageError, match="compute_loss needs 'labels'"):
        OwnLoss(Bare(), _args(tmp_path), eval_dataset=rows).evaluate()


def test_a_column_that_was_left_out_is_missing(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return inputs["weight"].sum()

    rows = [{**row, "weight": torch.ones(())} for row in DATA]
    with pytest.raises(UsageError) as error:
        Weighted(Bare(), _args(tmp_path), train_dataset=rows).train()
    _says(error.value, what="compute_loss needs 'weight'", where="compute_loss", do="set remove_unused_columns=False")


def test_a_model_without_a_loss(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        Trainer(Bare(), _args(tmp_path), train_dataset=[{"x": torch.ones(1)}]).train()
    _says(
        error.value, what="the model (Bare) returned no loss", where="Trainer.compute_loss", do="override compute_loss"
    )


def test_metrics_without_labels(tmp_path: Path) -> None:
    rows = [{"x": torch.ones(1)} for _ in range(4)]
    trainer = Trainer(Line(), _args(tmp_path), eval_dataset=rows, compute_metrics=lambda result: {})
    with pytest.raises(UsageError) as error:
        trainer.evaluate()
    _says(error.value, what="compute_metrics needs labels", where="compute_metrics", do="label_names")
    assert trainer.predict(rows).label_ids is None  # nothing to compare with is no error here


def test_compute_loss_that_returns_one_result(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        OneResult(Bare(), _args(tmp_path), eval_dataset=DATA).evaluate()
    _says(error.value, what="returned a Tensor, not (loss, outputs)", where="OneResult.compute_loss", do="return (loss")


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    def train(wanted: Any) -> None:
        Trainer(Line(), _args(tmp_path), train_dataset=DATA).train(resume_from_checkpoint=wanted)

    with pytest.raises(ValueError, match="No valid checkpoint found in output directory") as error:  # as transformers
        train(True)
    assert isinstance(error.value, UsageError)
    _says(error.value, what=str(tmp_path), where="resume_from_checkpoint=True", do="'auto' to start from scratch")
    with pytest.raises(UsageError, match="there is no folder"):
        train(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"neither a manifest, nor a trainer_state\.json"):
        train(str(tmp_path))
    train("auto")
    train(False)
    with pytest.raises(UsageError, match=r"train.. has no argument trail"):
        Trainer(Line(), _args(tmp_path), train_dataset=DATA).train(trail=1)


def test_early_stopping_without_a_metric(tmp_path: Path) -> None:
    trainer = Trainer(Line(), _args(tmp_path), train_dataset=DATA, callbacks=[EarlyStoppingCallback()])
    with pytest.raises(ConfigError) as error:
        trainer.train()
    _says(error.value, what="needs a metric", where="EarlyStoppingCallback", do="set metric_for_best_model")


def test_a_wrong_key_for_the_accelerator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Trainer(Line(), _args(tmp_path, accelerator_config={"split_batch": True}))
    _says(error.value, what="no key 'split_batch'", where="accelerator_config", do="did you mean 'split_batches'?")
    two = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    with pytest.raises(ConfigError, match="conflicts with num_steps"):
        Trainer(Line(), _args(tmp_path, accelerator_config=two, gradient_accumulation_steps=3))
    with pytest.raises(ConfigError, match="has no key 'num_step'"):
        Trainer(Line(), _args(tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"num_step": 2}}))


def test_predictions_that_cannot_be_joined(tmp_path: Path) -> None:
    class Shapes(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).sum(), "logits": torch.zeros(x.shape[0], 2, 3 if x[0, 0] == 0 else 4)}

    rows = [{"x": torch.full((1,), float(i)), "labels": torch.ones(())} for i in range(2)]
    args = _args(tmp_path, per_device_eval_batch_size=1)
    with pytest.raises(UsageError) as error:
        Trainer(Shapes(), args).predict(rows)
    _says(
        error.value,
        what="the predictions of 2 batches cannot be concatenated",
        where="eval_do_concat",
        do="eval_do_concat_batches=False",
    )
    args.eval_do_concat_batches = False
    assert [part.shape for part in Trainer(Shapes(), args).predict(rows).predictions] == [(1, 2, 3), (1, 2, 4)]


class NoLoss(Line):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": self.layer(x).squeeze(-1)}


def test_a_model_that_takes_labels_and_returns_no_loss(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        Trainer(NoLoss(), _args(tmp_path), train_dataset=DATA).train()
    _says(
        error.value,
        what="the model (NoLoss) returned no loss; the batch",
        where="compute_loss",
        do="return the loss, as",
    )


def test_no_column_that_forward_accepts(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        Trainer(Line(), _args(tmp_path), train_dataset=[{"text": "a", "length": 1}]).train()
    _says(
        error.value,
        what="Line.forward accepts none of the dataset's columns (text, length); it accepts x, labels",
        where="remove_unused_columns",
        do="rename the columns",
    )


def test_a_batch_without_what_forward_requires(tmp_path: Path) -> None:
    rows = [{"inputs": torch.zeros(1), "labels": torch.zeros(1)}] * 4
    with pytest.raises(UsageError) as error:
        Trainer(Line(), _args(tmp_path), train_dataset=rows).train()
    _says(
        error.value,
        what="Line.forward requires 'x', but the batch has only labels",
        where="Trainer.train_dataset",
        do="name the columns of the dataset as forward's parameters",
    )


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("learning_rate", "1e-3", 1e-3),
        ("max_steps", "10", 10),
        ("warmup_steps", "0.5", 0.5),
        ("bf16", "False", False),
        ("save_total_limit", "2", 2),
    ],
)
def test_text_is_read_as_a_number(tmp_path: Path, name: str, text: str, number: float) -> None:
    value = getattr(_args(tmp_path, **{name: text}), name)
    assert value == number
    assert type(value) is type(number)


def test_text_is_read_after_a_parser_has_resolved_the_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HfArgumentParser does: it replaces the types of the fields, which are texts, by the types themselves."""
    hints = typing.get_type_hints(TrainingArguments)
    for item in dataclasses.fields(TrainingArguments):
        kinds = [kind for kind in typing.get_args(hints[item.name]) if kind is not type(None)]
        monkeypatch.setattr(item, "type", kinds[0] if kinds else hints[item.name])
    args = _args(tmp_path, learning_rate="1e-3", save_total_limit="2")
    assert (args.learning_rate, args.save_total_limit) == (1e-3, 2)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [("learning_rate", "fast", "a number"), ("max_steps", "1.5", "an integer"), ("bf16", "yes", "true or false")],
)
def test_text_that_is_no_number(tmp_path: Path, name: str, text: str, kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        _args(tmp_path, **{name: text})
    _says(error.value, what=f"{name}={text!r} is not {kind}", where=f"TrainingArguments.{name}", do="set a value")


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        ({"callbacks": [print]}, "print is not a callback", "derive from TrainerCallback"),
        ({"callbacks": print}, "callbacks is a builtin_function_or_method, not a list", "a list of callbacks"),
        ({"args": {"output_dir": "out"}}, "args is a dict, not TrainingArguments", "pass TrainingArguments("),
        (
            {"optimizers": torch.optim.SGD(Line().parameters())},
            "optimizers is a SGD, not a pair",
            "(optimizer, scheduler)",
        ),
    ],
)
def test_an_argument_in_another_form(tmp_path: Path, options: dict[str, Any], what: str, do: str) -> None:
    with pytest.raises(UsageError) as error:
        Trainer(Line(), **{"args": _args(tmp_path), **options})
    _says(error.value, what=what, where=f"Trainer({next(iter(options))}=", do=do)


def test_metrics_that_are_no_dict(tmp_path: Path) -> None:
    trainer = Trainer(Line(), _args(tmp_path), eval_dataset=DATA, compute_metrics=lambda result: 0.5)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError) as error:
        trainer.evaluate()
    _says(error.value, what="compute_metrics returned a float", where="compute_metrics=", do="{'accuracy': 0.5}")


def test_the_begin_of_a_name_is_suggested_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        _args(tmp_path, optim="adamw")
    assert error.value.do == "did you mean 'adamw_torch'?"
