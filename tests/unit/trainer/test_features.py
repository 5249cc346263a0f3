"""The Trainer beside other libraries: optuna's search, text generation, the Hugging Face Hub."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from echelon.base.errors import ConfigError, MissingExtraError, UsageError
from echelon.trainer import (
    BestRun,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from echelon.trainer.features.hyperparameter_search import default_compute_objective
from tests.trainer_models import DATA, Line, arguments

PLAIN: dict[str, Any] = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0}


def _args(folder: Path | str, **options: Any) -> TrainingArguments:
    return arguments(folder, **{"per_device_train_batch_size": 10, **options})


# ---- search ----------------------------------------------------------------------------------------------------------


def _loss_after_one_step(rate: float, start: float) -> float:
    """Of y = w x + b on y = 2 x, x = 0 ... 9: the gradients are 2 * 28.5 (w - 2) and 2 * 4.5 (w - 2)."""
    weight, bias = start - rate * 57 * (start - 2), -rate * 9 * (start - 2)
    return sum((weight * x + bias - 2 * x) ** 2 for x in range(10)) / 10


def test_a_search_finds_the_best_settings_and_leaves_the_arguments_as_they_were(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    started = []

    class Looks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            started.append((args.learning_rate, state.is_hyper_param_search, state.trial_name, state.trial_params))

    args = _args(tmp_path, save_strategy="epoch", **PLAIN)
    trainer = Trainer(
        model_init=lambda trial: Line(0.0 if trial is None else trial.params.get("start", 0.0)),
        args=args,
        train_dataset=DATA,
        eval_dataset=DATA,
        callbacks=[Looks()],
    )

    def space(trial: Any) -> dict[str, Any]:
        trial.suggest_categorical("start", [1.0])  # of the model: read in model_init
        return {"learning_rate": trial.suggest_categorical("learning_rate", [0.001, 0.01, 0.015])}

    grid = optuna.samplers.GridSampler({"learning_rate": [0.001, 0.01, 0.015], "start": [1.0]}, seed=0)
    best = trainer.hyperparameter_search(space, n_trials=3, sampler=grid, hp_name=lambda trial: f"try-{trial.number}")
    assert isinstance(best, BestRun)
    expected = {rate: _loss_after_one_step(rate, 1.0) for rate in (0.001, 0.01, 0.015)}
    assert best.hyperparameters == {"start": 1.0, "learning_rate": min(expected, key=expected.__getitem__)}
    assert best.objective == pytest.approx(min(expected.values()), rel=1e-4)
    found = {trial.params["learning_rate"]: trial.value for trial in best.run_summary.trials}
    assert found == pytest.approx(expected, rel=1e-4)  # float32
    assert [name for _, _, name, _ in started] == ["try-0", "try-1", "try-2"]
    assert all(is_search and values == {"learning_rate": rate} for rate, is_search, _, values in started)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["try-0", "try-1", "try-2"]
    assert (tmp_path / "try-0" / "checkpoint-1").is_dir()
    assert args.learning_rate == 5e-5
    trainer.train()  # as before the search
    assert started[-1][1:] == (False, None, None)


def test_a_trial_of_no_use_is_ended_early(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    class EndsAll(optuna.pruners.BasePruner):  # type: ignore[misc]
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number)

    args = _args(tmp_path, eval_strategy="epoch", num_train_epochs=3, **PLAIN)
    trainer = Trainer(model_init=Line, args=args, train_dataset=DATA, eval_dataset=DATA)
    best = trainer.hyperparameter_search(lambda trial: {}, n_trials=2, pruner=EndsAll())
    assert isinstance(best, BestRun)
    assert best.run_id == "0"
    assert [trial.state.name for trial in best.run_summary.trials] == ["COMPLETE", "PRUNED"]
    assert [len(trial.intermediate_values) for trial in best.run_summary.trials] == [3, 1]


def test_what_a_search_cannot_do_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = Trainer(Line(), _args(tmp_path), train_dataset=DATA)
    with pytest.raises(UsageError, match="the Trainer has no model_init"):
        fixed.hyperparameter_search()
    trainer = Trainer(model_init=Line, args=_args(tmp_path), train_dataset=DATA, eval_dataset=DATA)
    for backend, message in (("ray", "runs trials in separate processes"), ("grid", "'grid' is unknown")):
        with pytest.raises(ConfigError, match=message):
            trainer.hyperparameter_search(backend=backend)
    with pytest.raises(ConfigError, match="n_jobs=2"):
        trainer.hyperparameter_search(n_jobs=2)
    with pytest.raises(ConfigError, match="hp_space returned 'learning_rat', which is not a TrainingArguments setting"):
        trainer.train(trial={"learning_rat": 1.0})
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match='pip install "optuna>='):
        trainer.hyperparameter_search()


def test_the_objective_is_the_loss_or_the_sum_of_the_metrics() -> None:
    times = {"eval_runtime": 3.0, "eval_samples_per_second": 4.0, "epoch": 1.0}
    assert default_compute_objective({"eval_loss": 0.5, **times}) == 0.5
    assert default_compute_objective({"eval_loss": 0.5, "eval_f1": 0.25, "eval_recall": 0.5, **times}) == 0.75


# ---- generation ------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Generates the numbers after the first token, as many as that token says, at most ``max_length``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.generation_config = SimpleNamespace(max_length=6, max_new_tokens=None, pad_token_id=9)
        self.asked: list[dict[str, Any]] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.weight * 3.0, "logits": F.one_hot(input_ids, 10).float()}

    def generate(self, input_ids: torch.Tensor, max_length: int = 6, **more: Any) -> torch.Tensor:
        self.asked.append({"max_length": max_length, **more})
        longest = min(int(input_ids[:, 0].max()), max_length)
        return torch.arange(longest).expand(len(input_ids), -1).clone()


PAIRS = [{"input_ids": torch.tensor([n, 0]), "labels": torch.tensor([n])} for n in (2, 3, 1)]


def test_an_evaluation_generates_where_asked_for(tmp_path: Path) -> None:
    seen = {}

    def metrics(result: Any) -> dict[str, float]:
        seen["predictions"], seen["labels"] = result.predictions.tolist(), result.label_ids.tolist()
        return {"length": float(result.predictions.shape[1])}

    options: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "per_device_eval_batch_size": 2}
    args = Seq2SeqTrainingArguments(**options, predict_with_generate=True, generation_num_beams=2, disable_tqdm=True)
    model = Counts()
    trainer = Seq2SeqTrainer(model, args, eval_dataset=PAIRS, compute_metrics=metrics)
    found = trainer.evaluate(max_length=4)
    assert (found["eval_loss"], found["eval_length"]) == (3.0, 4.0)
    assert model.asked == [{"max_length": 4, "num_beams": 2}] * 2
    # Padded to what was asked for, so that the batches fit together without -100.
    assert seen["predictions"] == [[0, 1, 2, 9], [0, 1, 2, 9], [0, 9, 9, 9]]
    assert seen["labels"] == [[2, 9, 9, 9], [3, 9, 9, 9], [1, 9, 9, 9]]
    args.generation_max_length = 5
    assert trainer.predict(PAIRS).predictions.shape == (3, 5)
    trainer.evaluate()
    assert model.asked[-1] == {"max_length": 5, "num_beams": 2}
    unlabelled = [{"input_ids": row["input_ids"]} for row in PAIRS]
    assert trainer.predict(unlabelled, max_new_tokens=2).predictions.shape[1] == 3
    plain = Seq2SeqTrainer(model, Seq2SeqTrainingArguments(**options, disable_tqdm=True))
    assert plain.predict(PAIRS).predictions.shape == (3, 2, 10)  # logits


def test_settings_of_none_that_a_subclass_passes_to_the_generation_are_dropped(tmp_path: Path) -> None:
    class Answers(Seq2SeqTrainer):
        def evaluate(self, *args: Any, **gen_kwargs: Any) -> Any:  # as in question answering
            self._gen_kwargs = {"max_length": None, "num_beams": None, **gen_kwargs}
            loader = self.get_eval_dataloader()
            return self.evaluation_loop(loader, description="Evaluation", metric_key_prefix="eval").metrics

    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, predict_with_generate=True)
    model = Counts()
    Answers(model, args, eval_dataset=PAIRS).evaluate(do_sample=False)
    assert model.asked == [{"max_length": 6, "do_sample": False}]  # 6 is the model's own


def test_a_generation_config_is_put_into_the_model(tmp_path: Path) -> None:
    config = SimpleNamespace(max_length=3, max_new_tokens=None, pad_token_id=0, to_dict=lambda: {"max_length": 3})
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, generation_config=config)
    model = Counts()
    Seq2SeqTrainer(model, args)
    assert (model.generation_config.max_length, model.generation_config is config) == (3, False)
    assert args.to_dict()["generation_config"] == {"max_length": 3}
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, predict_with_generate=True)
    with pytest.raises(UsageError, match=r"Line has no generate\(\)"):
        Seq2SeqTrainer(Line(), args).predict(DATA)
    with pytest.raises(ConfigError, match="sortish_sampler is not supported"):
        Seq2SeqTrainingArguments(output_dir=str(tmp_path), sortish_sampler=True)


# ---- the Hub ---------------------------------------------------------------------------------------------------------


class Hub(ModuleType):
    """What is called of huggingface_hub."""

    def __init__(self) -> None:
        super().__init__("huggingface_hub")
        self.made: list[dict[str, Any]] = []
        self.uploads: list[dict[str, Any]] = []

    def create_repo(self, **options: Any) -> Any:
        self.made.append(options)
        return SimpleNamespace(repo_id=f"me/{options['repo_id']}")

    def upload_folder(self, **options: Any) -> Any:
        files = sorted(path.name for path in Path(options["folder_path"]).iterdir())
        self.uploads.append({**options, "files": files})
        if not options["run_as_future"]:
            return "a commit"
        future: Future[str] = Future()
        future.set_result("a commit")
        return future


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    module = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_a_model_is_uploaded_with_its_card(tmp_path: Path, hub: Hub) -> None:
    folder = tmp_path / "my-model"
    args = _args(folder, hub_token="secret", hub_private_repo=True, eval_strategy="epoch", logging_strategy="epoch")
    events = []

    class Looks(TrainerCallback):
        def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append("push")

    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[Looks()])
    trainer.train()
    assert trainer.push_to_hub(commit_message="Done", revision="main", license="mit", dataset="numbers") == "a commit"
    trainer.init_hf_repo()  # a second time: it is there
    assert hub.made == [{"repo_id": "my-model", "token": "secret", "private": True, "exist_ok": True}]
    upload = hub.uploads[0]
    assert (upload["repo_id"], upload["commit_message"], upload["revision"]) == ("me/my-model", "Done", "main")
    assert upload["files"] == ["README.md", "model.safetensors", "training_args.json"]
    assert upload["ignore_patterns"] == ["_*", "checkpoint-*", ".lock*"]
    assert events == ["push"]
    card = (folder / "README.md").read_text()
    assert card.startswith(
        "---\nlibrary_name: pytorch\nlicense: mit\ntags:\n- generated_from_trainer\nmodel-index:\n- name: my-model\n  results: []\n---\n"
    )
    assert "Trained on numbers." in card
    assert "- learning_rate: 5e-05" in card
    assert "| step | training loss | validation loss |" in card
    assert "secret" not in card
    trainer.create_model_card(model_name="Mine", finetuned_from="theirs", tags="numbers")
    card = (folder / "README.md").read_text()
    assert "base_model: theirs\ntags:\n- numbers\n- generated_from_trainer\n" in card
    assert "# Mine\n\nA fine-tuned version of theirs.\n" in card


def test_a_card_holds_the_results_for_the_hub_and_no_later_evaluation_in_its_table(tmp_path: Path) -> None:
    given = iter([0.25, 0.5, 0.75])
    args = _args(tmp_path / "it", eval_strategy="epoch", logging_strategy="epoch", num_train_epochs=2)
    trainer = Trainer(
        Line(),
        args,
        train_dataset=DATA,
        eval_dataset=DATA,
        compute_metrics=lambda _: {"accuracy": next(given), "own": 1},
    )
    trainer.train()
    trainer.evaluate()  # as scripts do, with the best model
    trainer.create_model_card(
        tasks="text-classification", dataset=["GLUE MNLI"], dataset_tags=["glue"], dataset_args=["mnli"]
    )
    _, head, text = (tmp_path / "it" / "README.md").read_text().split("---\n", 2)
    (index,) = yaml.safe_load(head)["model-index"]
    assert index["name"] == "it"
    assert index["results"] == [
        {
            "task": {"name": "Text classification", "type": "text-classification"},
            "dataset": {"name": "GLUE MNLI", "type": "glue", "args": "mnli"},
            "metrics": [{"name": "Accuracy", "type": "accuracy", "value": 0.75}],
        }
    ]
    assert "- accuracy: 0.75\n" in text
    table = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    column = [name.strip() for name in table[0]].index("accuracy")
    assert [row[column].strip() for row in table[2:]] == ["0.25", "0.5"]


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("end", []),
        ("every_save", [None, None]),
        ("checkpoint", [None, "last-checkpoint", None, "last-checkpoint"]),
        ("all_checkpoints", [None, "checkpoint-1", None, "checkpoint-2"]),
    ],
)
def test_checkpoints_are_uploaded_as_the_strategy_says(
    tmp_path: Path, hub: Hub, strategy: str, folders: list[str | None]
) -> None:
    args = _args(
        tmp_path, push_to_hub=True, hub_strategy=strategy, hub_model_id="it", num_train_epochs=2, save_strategy="epoch"
    )
    trainer = Trainer(Line(), args, train_dataset=DATA)
    trainer.train()
    assert [upload.get("path_in_repo") for upload in hub.uploads] == folders
    copied = {path.name for path in tmp_path.iterdir() if path.is_file()}  # the model, not the state of the training
    assert "rank_00000.safetensors" not in copied
    assert ("model.safetensors" in copied) is bool(folders)
    hub.uploads.clear()
    trainer.save_model()
    assert [upload["commit_message"] for upload in hub.uploads] == ["Model save"]
    assert (trainer.hub_model_id, args.hub_model_id) == ("me/it", "it")


def test_without_the_library_an_upload_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match='pip install "huggingface_hub>='):
        Trainer(Line(), _args(tmp_path)).push_to_hub()
