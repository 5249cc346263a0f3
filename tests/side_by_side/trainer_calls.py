"""Counts the calls of every private method of the Trainer in small trainings, with transformers or with echelon.

``python tests/side_by_side/trainer_calls.py --write``, in an environment with transformers and datasets, writes
tests/data/trainer_calls.json; a unit test compares echelon's counts with the file.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

DATA = Path(__file__).resolve().parents[1] / "data" / "trainer_calls.json"
METHODS = """
    _build_accelerator_args _clip_grad_norm _defer_fsdp_gradient_reduction _determine_best_metric _evaluate
    _finalize_training _finish_current_push _get_collator_with_removed_columns _get_dataloader _get_eval_sampler
    _get_grad_norm _get_learning_rate _get_num_items_in_batch _get_output_dir _get_train_sampler _has_mixed_mesh_grads
    _hp_search_setup _init_training_state _inner_training_loop _issue_warnings_after_load _load_best_model
    _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler
    _maybe_log_save_evaluate _mixed_mesh_grad_norm _move_model_to_device _prepare_context_parallel_inputs
    _prepare_for_training _prepare_input _prepare_inputs _push_from_checkpoint _remove_unused_columns _report_to_hp_search
    _run_epoch _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler
    _set_signature_columns_if_needed _sync_replicated_trainable_parameters _track_num_input_tokens _tune_save_checkpoint
    _update_auto_batch_size _validate_args _wrap_model
""".split()  # noqa: SIM905 - one name a line would be half a page
"""Every private method of transformers 5.23."""
PUBLIC = "set_initial_training_values get_total_train_batch_size store_flos floating_point_ops training_step".split()  # noqa: SIM905


class Model(nn.Module):
    """A linear model that computes its loss."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.layer(x).squeeze(-1)
        return {"logits": y} if labels is None else {"loss": F.mse_loss(y, labels), "logits": y}


ROWS = [{"x": torch.tensor([float(i), 1.0]), "labels": torch.tensor(2.0 * i), "unused": i} for i in range(12)]


def counting(trainer: type[Any], counts: Counter[str]) -> type[Any]:
    """Return a subclass of ``trainer`` that overrides every method, counts the calls, and calls ``super()``."""

    def override(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return getattr(super(Counting, self), name)(*args, **kwargs)

        return method

    Counting: Any = type("Counting", (trainer,), {name: override(name) for name in (*METHODS, *PUBLIC)})
    return Counting  # type: ignore[no-any-return]


@contextlib.contextmanager
def hub(package: Any) -> Iterator[None]:
    """Replace the Hub, as ``package`` reaches it, by functions that do nothing."""
    done: Future[str] = Future()
    done.set_result("commit")
    api = SimpleNamespace(
        create_repo=lambda *args, **kwargs: SimpleNamespace(repo_id="me/it"), upload_folder=lambda **kwargs: done
    )
    module = sys.modules.get(f"{package.__name__}.trainer")
    if hasattr(module, "hf_api"):
        with mock.patch.object(module, "hf_api", return_value=api):
            yield
        return
    fake: Any = ModuleType("huggingface_hub")
    fake.create_repo, fake.upload_folder = api.create_repo, api.upload_folder
    with mock.patch.dict(sys.modules, {"huggingface_hub": fake}):
        yield


class _Table:
    """A dataset with named columns, as in the library ``datasets``."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: values[row] for name, values in self._columns.items()}

    def remove_columns(self, column_names: list[str]) -> Any:
        return _Table({name: values for name, values in self._columns.items() if name not in column_names})


class _Scenarios:
    def __init__(self, package: Any, folder: Path, **options: Any) -> None:
        self.package, self.folder, self.options = package, folder, options

    def trainer(
        self,
        counts: Counter[str],
        name: str,
        *,
        model_init: Callable[[], nn.Module] | None = None,
        data: Any = None,
        **options: Any,
    ) -> Any:
        defaults: dict[str, Any] = {
            "output_dir": str(self.folder / name),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 4,
            "num_train_epochs": 2,
            "gradient_accumulation_steps": 2,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "save_strategy": "no",
        }
        arguments = self.package.TrainingArguments(**{**defaults, **self.options, **options})
        kind = counting(self.package.Trainer, counts)
        source = {"model": Model()} if model_init is None else {"model_init": model_init}
        return kind(**source, args=arguments, train_dataset=data or ROWS, eval_dataset=ROWS[:6])

    def train_with_the_best_model(self, counts: Counter[str]) -> None:
        self.trainer(
            counts, "best", eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, logging_steps=2
        ).train()

    def resume(self, counts: Counter[str]) -> None:
        options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4, "logging_steps": 1}
        self.trainer(Counter(), "resume", **options).train()
        options["max_steps"] = 6
        trainer = self.trainer(counts, "resume", max_grad_norm=0.0, **options)
        trainer.train(resume_from_checkpoint=True)

    def count_tokens(self, counts: Counter[str]) -> None:
        self.trainer(counts, "tokens", include_num_input_tokens_seen="all", max_steps=2).train()

    def evaluate_and_predict(self, counts: Counter[str]) -> None:
        trainer = self.trainer(counts, "evaluate")
        trainer.evaluate()
        trainer.predict(ROWS[:4])

    def upload(self, counts: Counter[str]) -> None:
        with hub(self.package):
            trainer = self.trainer(
                counts, "upload", push_to_hub=True, hub_model_id="it", save_strategy="epoch", num_train_epochs=1
            )
            trainer.create_model_card = lambda **kwargs: None
            trainer.train()

    def find_the_batch_size(self, counts: Counter[str]) -> None:
        self.trainer(counts, "size", auto_find_batch_size=True, max_steps=1).train()

    def make_a_new_model(self, counts: Counter[str]) -> None:
        self.trainer(counts, "init", model_init=Model, max_steps=1).train()

    def train_on_a_table(self, counts: Counter[str]) -> None:
        columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
        plain = {name: [torch.as_tensor(value).tolist() for value in values] for name, values in columns.items()}
        self.trainer(counts, "table", data=self.make_table(plain), max_steps=1).train()

    def make_table(self, columns: dict[str, list[Any]]) -> Any:
        if self.package.__name__ == "transformers":
            import datasets

            return datasets.Dataset.from_dict(columns)
        return _Table(columns)

    def save(self, counts: Counter[str]) -> None:
        trainer = self.trainer(counts, "save")
        trainer.save_model(str(self.folder / "saved"))


SCENARIOS = tuple(name for name in vars(_Scenarios) if not name.startswith(("_", "make_table")) and name != "trainer")


def count_calls(package: Any, scenario: str, folder: Path, **options: Any) -> dict[str, int]:
    """Return the number of calls of each method in one scenario.

    Args:
        package: module with ``Trainer`` and ``TrainingArguments``.
        scenario: one of ``SCENARIOS``.
        folder: an empty directory.
        options: more arguments of the Trainer.
    """
    counts: Counter[str] = Counter()
    getattr(_Scenarios(package, folder, **options), scenario)(counts)
    return dict(sorted(counts.items()))


def main() -> None:
    """Record transformers' counts."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        has_tables = find_spec("datasets") is not None
        names = [name for name in SCENARIOS if has_tables or name != "train_on_a_table"]
        found = {name: count_calls(transformers, name, Path(folder)) for name in names}
    text = json.dumps({"transformers": transformers.__version__, "calls": found}, indent=1) + "\n"
    if "--write" in sys.argv:
        DATA.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
