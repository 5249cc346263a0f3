"""Uploads a model and its model card (README.md) to the Hugging Face Hub."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from echelon._version import __version__
from echelon.base.logging import get_logger
from echelon.base.optional import require
from echelon.trainer.arguments.enums import HubStrategy
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.callbacks.progress_bars import loss_rows

logger = get_logger(__name__)

CARD_FILE = "README.md"
# Not uploaded from output_dir: private files, and checkpoints, which hub_strategy controls.
_NOT_UPLOADED = ["_*", "checkpoint-*", ".lock*"]
# Files of a checkpoint that only resuming needs.
_RESUME_FILES = re.compile(
    r"manifest\.json|objects\.json|rank_\d+\.(safetensors|json)|(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth"
)
# Metrics that the Hub's index of results knows, and their types there.
_METRICS = {
    "accuracy": "accuracy",
    "bleu": "bleu",
    "f1": "f1",
    "matthews_correlation": "matthews_correlation",
    "pearsonr": "pearsonr",
    "precision": "precision",
    "recall": "recall",
    "rouge": "rouge",
    "rouge1": "rouge",
    "sacrebleu": "sacrebleu",
    "spearmanr": "spearmanr",
    "wer": "wer",
}
_SETTINGS = (
    "learning_rate",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "optim",
    "lr_scheduler_type",
    "warmup_steps",
    "num_train_epochs",
    "max_steps",
    "mixed_precision",
    "label_smoothing_factor",
)


class HubUpload:
    """A Trainer's Hub repository; used only on the saving rank."""

    def __init__(self, args: TrainingArguments, output_dir: Path) -> None:
        self._args = args
        self._output_dir = output_dir
        self._running: list[Any] = []
        self.repository: str | None = None
        """The repository's full name, once it exists."""

    def open(self, token: str | None = None, private: bool | None = None) -> str:
        """Create the repository if it does not exist, and return its name.

        Raises:
            MissingExtraError: huggingface_hub is not installed.
        """
        if self.repository is None:
            hub: Any = require("huggingface_hub", extra="hub", purpose="push_to_hub")
            name = self._args.hub_model_id or self._output_dir.absolute().name
            url = hub.create_repo(
                repo_id=name,
                token=token or self._args.hub_token,
                private=self._args.hub_private_repo if private is None else private,
                exist_ok=True,
            )
            self.repository = str(url.repo_id)
        return self.repository

    def upload(self, message: str, *, blocking: bool, token: str | None, revision: str | None) -> Any:
        """Upload the output directory; return the commit or, if not ``blocking``, a future."""
        result = self._send(
            self._output_dir, message, token=token, revision=revision, blocking=blocking, ignore_patterns=_NOT_UPLOADED
        )
        if not blocking:
            self._running.append(result)
        return result

    def upload_checkpoint(self, checkpoint: Path, *, step: int, before: Callable[[], Any]) -> bool:
        """Start the uploads that ``hub_strategy`` requires after a checkpoint, and return whether one was started.

        An upload is skipped while another one is running, unless ``hub_always_push`` is set. ``before`` is called
        before each upload.
        """
        args = self._args
        self._running = [one for one in self._running if not one.done()]
        if args.hub_strategy == HubStrategy.END or (self._running and not args.hub_always_push):
            return False
        before()
        for path in checkpoint.iterdir():
            if path.is_file() and not _RESUME_FILES.fullmatch(path.name):
                shutil.copy2(path, self._output_dir / path.name)
        message = f"Training in progress, step {step}"
        self.upload(message, blocking=False, token=None, revision=args.hub_revision)
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = args.hub_strategy == HubStrategy.CHECKPOINT
            folder = "last-checkpoint" if is_last else checkpoint.name
            self._running.append(
                self._send(
                    checkpoint,
                    f"{message}, checkpoint",
                    revision=args.hub_revision,
                    blocking=False,
                    path_in_repo=folder,
                )
            )
        return True

    def wait(self) -> None:
        """Wait for the background uploads; raise the error if one failed."""
        if self._running:
            logger.info("waiting for the upload to %s", self.repository)
        running, self._running = self._running, []
        for one in running:
            one.result()

    def _send(
        self, folder: Path, message: str, *, blocking: bool, revision: str | None, token: str | None = None, **more: Any
    ) -> Any:
        hub: Any = require("huggingface_hub", extra="hub", purpose="push_to_hub")
        return hub.upload_folder(
            repo_id=self.open(token),
            folder_path=str(folder),
            commit_message=message,
            token=token or self._args.hub_token,
            run_as_future=not blocking,
            revision=revision,
            **more,
        )


def tags_of(model: Any, given: Any) -> list[str]:
    """Return the tags in ``given`` (one or several) followed by the model's own tags."""
    tags = [given] if isinstance(given, str) else list(given or ())
    return [*tags, *(tag for tag in getattr(model, "model_tags", None) or () if tag not in tags)]


def write_card(
    output_dir: Path,
    model: Any,
    args: TrainingArguments,
    log_history: Sequence[Mapping[str, Any]],
    metadata: Mapping[str, Any],
    *,
    name: str | None,
    data: Any,
) -> None:
    """Write the model card to the output directory: metadata as YAML, results, settings and versions."""
    import yaml  # noqa: PLC0415 - slows down imports

    base, tags, title = metadata["base_model"], metadata["tags"], name or output_dir.absolute().name
    base = base or getattr(getattr(model, "config", None), "_name_or_path", None)
    evaluation, names = _last_evaluation(log_history), _as_list(data)
    results = _results(
        evaluation,
        tasks=metadata["pipeline_tag"],
        data=data,
        data_tags=metadata["datasets"],
        data_args=metadata["dataset_args"],
    )
    head = {
        "library_name": "transformers" if hasattr(model, "push_to_hub") else "pytorch",
        **{key: value for key, value in metadata.items() if key != "dataset_args"},
        "base_model": base,
        "tags": [*([tags] if isinstance(tags, str) else tags or []), "generated_from_trainer"],
        "model-index": [{"name": title, "results": results}],
    }
    head = {key: value for key, value in head.items() if value}
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(), "---", "", f"# {title}", ""]
    if base or names:
        origin = f"A fine-tuned version of {base}" if base else "Trained"
        lines += [f"{origin}{' on ' if names else ''}{', '.join(names)}.", ""]
    if evaluation:
        lines += ["On the evaluation set:", ""]
        lines += [
            f"- {key.removeprefix('eval_')}: {value:.4g}" if isinstance(value, float) else f"- {key}: {value}"
            for key, value in evaluation.items()
            if key.startswith("eval_") and not key.endswith(("_runtime", "_per_second", "_time"))
        ]
        lines.append("")
    lines += ["## Training", ""]
    lines += [f"- {setting}: {getattr(args, setting)}" for setting in _SETTINGS if getattr(args, setting)]
    lines.append("")
    if (rows := loss_rows(log_history, by="step")) is not None:
        table = ["| " + " | ".join(row) + " |" for row in rows]
        lines += [table[0], "|" + " ---: |" * len(rows[0]), *table[1:], ""]
    versions = {"echelon": __version__, "torch": torch.__version__, "python": platform.python_version()}
    lines += ["## Versions", "", *(f"- {package} {version}" for package, version in versions.items()), ""]
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / CARD_FILE).write_text("\n".join(lines), encoding="utf-8")


def _last_evaluation(log_history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last evaluation's log entry; empty if there is none."""
    evaluations = [entry for entry in log_history if any(key.startswith("eval_") for key in entry)]
    return evaluations[-1] if evaluations else {}


def _results(
    evaluation: Mapping[str, Any], *, tasks: Any, data: Any, data_tags: Any, data_args: Any
) -> list[dict[str, Any]]:
    """Return the model index's results: the metrics that the Hub knows, for each task and dataset.

    The Hub refuses results that lack a task, a dataset or metrics, so these are left out.
    """
    metrics = [
        {"name": key.removeprefix("eval_").title(), "type": _METRICS[key.removeprefix("eval_").lower()], "value": value}
        for key, value in evaluation.items()
        if key.removeprefix("eval_").lower() in _METRICS
    ]
    arguments = _as_list(data_args)
    datasets = [
        {"name": title, "type": tag, **({"args": arguments[i]} if i < len(arguments) else {})}
        for i, (title, tag) in enumerate(zip(_as_list(data), _as_list(data_tags)))
    ]
    return [
        {"task": {"name": task.replace("-", " ").capitalize(), "type": task}, "dataset": dataset, "metrics": metrics}
        for task in _as_list(tasks)
        for dataset in datasets
        if metrics
    ]


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
