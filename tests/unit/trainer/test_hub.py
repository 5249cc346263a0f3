"""The Trainer beside the Hugging Face Hub."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from echelon.base.errors import MissingExtraError
from echelon.trainer import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from tests.trainer_models import DATA, Line, arguments


def _args(folder: Path | str, **options: Any) -> TrainingArguments:
    return arguments(folder, **{"per_device_train_batch_size": 10, **options})


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
