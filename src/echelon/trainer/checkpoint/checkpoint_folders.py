"""The checkpoint-N directories: their names and formats; the newest and the best one; deletes surplus ones."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from echelon.accelerator.checkpoint.folders import checkpoint_format as format_of_environment, problems_in
from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.checkpoint import storage
from echelon.checkpoint.formats.transformers import evaluated_metric
from echelon.checkpoint.object_store import Location
from echelon.checkpoint.rotation import best_of, numbered, remove_oldest
from echelon.trainer.arguments.enums import SaveStrategy
from echelon.trainer.arguments.training_arguments import TrainingArguments, checkpoint_place
from echelon.trainer.state import TrainerState

logger = get_logger(__name__)

PREFIX = "checkpoint-"
WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "trainer_state.json"
ARGUMENTS_FILE = "training_args.json"
FORMATS = ("echelon", "transformers")


@runtime_checkable
class SavesItself(Protocol):
    """A tokenizer or processor with ``save_pretrained``, as in transformers."""

    def save_pretrained(self, save_directory: str, **options: Any) -> Any:
        """Write the object to a directory."""
        ...


def checkpoint_format(args: TrainingArguments) -> str:
    """Return the checkpoint format: ``echelon`` or ``transformers``.

    Raises:
        ConfigError: the format is unknown.
    """
    chosen, where = args.checkpoint_format, "TrainingArguments.checkpoint_format"
    if chosen is None:
        chosen, where = format_of_environment(), "env ECHELON_CHECKPOINT_FORMAT"
        if chosen == "accelerate":
            chosen = "transformers"  # the variable is for both levels of a program
    if (chosen or "echelon") not in FORMATS:
        raise ConfigError(
            f"checkpoint_format={chosen!r} is not one of {', '.join(FORMATS)}",
            where=where,
            do="use one of these",
        )
    return chosen or "echelon"


# ---- finding ---------------------------------------------------------------------------------------------------------


def get_last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest valid checkpoint-N in ``folder``, or None; log every checkpoint that is skipped.

    Examples:
        >>> folder = get_last_checkpoint("out")  # None if there is none
    """
    for path in reversed(numbered(storage.location(folder), prefix=PREFIX)):
        problems = problems_in(path)
        if not problems:
            return str(path)
        logger.warning(N_("%s is damaged or incomplete (%s); trying an older checkpoint"), path, problems[0])
    return None


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_json(path: Path, values: Any) -> None:
    """Write ``values`` as indented JSON."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


# ---- deleting --------------------------------------------------------------------------------------------------------


def remove_surplus(args: TrainingArguments, folder: Location, *, best: str | None, newest: Location) -> None:
    """Keep ``save_total_limit`` checkpoints, or those that may not be deleted: the best (``save_best``) and the newest one."""
    limit = args.save_total_limit
    best_place = None if best is None else storage.location(best)
    keep = {newest} if best_place is None else {newest, best_place}
    if args.save_best is not None:
        number = args.save_best - (best is not None)  # the best one counts, although a newer one may be equal
        others = [
            path for path in numbered(folder, prefix=PREFIX) if best_place is None or path.name != best_place.name
        ]
        name, is_greater = name_of_best_metric(args), bool(args.greater_is_better)
        keep |= set(
            best_of(others, lambda path: evaluated_metric(path, name), number=number, greater_is_better=is_greater)
        )
        limit = limit or 1
    if limit is None or limit <= 0:
        return
    try:
        remove_oldest(folder, prefix=PREFIX, limit=max(limit, len(keep)), keep=keep)
    except OSError as error:
        warn(_("saved {newest}, but could not delete older checkpoints: {error}", newest=newest, error=error))


# ---- the best model ----------------------------------------------------------------------------------------------------


def update_best_metric(args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> bool:
    """Record an evaluation's metric if it is the best so far, and return whether it is."""
    if args.metric_for_best_model is None:
        return False
    value = metric_for_best(args, metrics)
    if state.best_metric is None:  # so that nan never becomes the best
        state.best_metric = float("-inf" if args.greater_is_better else "inf")
    is_better = value > state.best_metric if args.greater_is_better else value < state.best_metric
    if is_better:
        state.best_metric = value
        if args.save_strategy != SaveStrategy.NO:  # otherwise it has no checkpoint
            state.best_global_step = state.global_step
    return is_better


def name_of_best_metric(args: TrainingArguments) -> str:
    """Return the name of ``metric_for_best_model`` in the logs."""
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"


def metric_for_best(args: TrainingArguments, metrics: dict[str, float]) -> float:
    """Return the value of ``metric_for_best_model``, which may be written without the prefix ``eval_``.

    Raises:
        ConfigError: the evaluation did not return this metric.
    """
    name = name_of_best_metric(args)
    if name not in metrics:
        raise ConfigError(
            f"metric_for_best_model={args.metric_for_best_model!r}, but the evaluation returned no {name!r}; "
            f"it returned {', '.join(metrics)}",
            where="TrainingArguments.metric_for_best_model",
            do="set metric_for_best_model to one of these metrics, or return it from compute_metrics",
        )
    return metrics[name]


def point_to_best(state: TrainerState, run_dir: Location, *, saved: Set[int]) -> None:
    """Set ``state.best_model_checkpoint`` if this run has saved the best step.

    Args:
        run_dir: directory of the checkpoints, as the arguments name it. It may hold another run's, too.
        saved: the steps that this run has saved, or is saving.
    """
    best = state.best_global_step
    if best is not None and best in saved:
        state.best_model_checkpoint = str(run_dir / f"{PREFIX}{best}")


def warn_of_unsaved_best(args: TrainingArguments, state: TrainerState) -> None:
    """Warn if the best step has no checkpoint, so that ``load_best_model_at_end`` cannot load it."""
    best, step = state.best_model_checkpoint, state.best_global_step
    if step is not None and (best is None or Path(best).name != f"{PREFIX}{step}"):
        loaded = state.global_step if best is None else Path(best).name.removeprefix(PREFIX)
        warn(
            _(
                "the best evaluation ({metric_for_best_model} {best_metric:.6g}) was at step {step}, which this run "
                "has not saved, so load_best_model_at_end leaves the model of step {loaded}. Save at every "
                "evaluation: set save_steps to eval_steps, or save_strategy='best'",
                metric_for_best_model=args.metric_for_best_model,
                best_metric=state.best_metric,
                step=step,
                loaded=loaded,
            )
        )


def remove_last_checkpoint(args: TrainingArguments, state: TrainerState, output_dir: Location) -> None:
    """Delete the last checkpoint if it is not the best one and ``save_total_limit=1`` kept it only for resuming."""
    best = state.best_model_checkpoint
    if args.should_save and best is not None and args.save_total_limit == 1 and args.save_best is None:
        remove_oldest(output_dir, prefix=PREFIX, limit=1, keep=[Path(best)])


def best_folder(args: TrainingArguments, output_dir: Location, best: str) -> Location:
    """Return the best checkpoint's place, looked up in ``output_dir`` if the run's directory has been moved."""
    as_saved, beside = checkpoint_place(args, best), output_dir / Path(best).name
    return beside if is_folder(beside) and not is_folder(as_saved) else as_saved


def is_folder(place: Location) -> bool:
    """Return whether ``place`` is a folder, or a link to one."""
    return storage.kind(storage.real_path(place)) == "folder"
