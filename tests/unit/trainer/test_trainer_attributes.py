"""Whatever a library reads of transformers' Trainer after training, it finds in echelon's.

Compared with the installed transformers (5.23). The releases from 5.6 on, which ``--as transformers`` supports, define the
same names, except those in ``OLDER``: the sources of 5.6, 5.9, 5.12, 5.15, 5.18 and 5.20 were compared with those of 5.23.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import echelon.trainer
from echelon.accelerator import AcceleratorState, ParallelismConfig
from echelon.base.errors import ConfigError
from echelon.trainer import OptimizerNames, Trainer, TrainingArguments
from echelon.trainer.state import TrainerState
from tests.trainer_models import Net, arguments, logged, net_data

_SHARDED_AT_LOAD = "for models that transformers shards while it loads them, which echelon's Trainer does not train"
EXCEPTIONS = {
    "__backends": "transformers' check of installed packages",
    "_defer_fsdp_gradient_reduction": _SHARDED_AT_LOAD,
    "_has_mixed_mesh_grads": _SHARDED_AT_LOAD,
    "_mixed_mesh_grad_norm": _SHARDED_AT_LOAD,
    "_mixed_mesh_grads": _SHARDED_AT_LOAD,
    "_sync_replicated_trainable_parameters": _SHARDED_AT_LOAD,
    "_tune_save_checkpoint": "for searches with Ray Tune, which are not supported",
    "_apply_legacy_fsdp_to_config": "a step of transformers' constructor; echelon reads fsdp and fsdp_config in fsdp_plugin_args",
    "_process_fsdp_args": "a step of transformers' constructor; its result is fsdp_plugin_args",
    "is_torch_greater_or_equal_than_2_8": "left over in transformers' class from the computation of default_optim",
}

# Names that only older releases define, and their values where they are not set.
OLDER = {"logging_dir": None, "warmup_ratio": None}


def _trained(library: ModuleType, folder: Path, model: nn.Module) -> Any:
    args = library.TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=4, max_steps=2, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = library.Trainer(model, args, train_dataset=net_data(8), eval_dataset=net_data(4))
    trainer.evaluate()
    trainer.train()
    trainer.predict(net_data(4))
    return trainer


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The same model and data, trained by transformers and by echelon."""
    transformers = pytest.importorskip("transformers")
    folders = [tmp_path_factory.mktemp(name) for name in ("theirs", "ours")]
    return _trained(transformers, folders[0], Net()), _trained(echelon.trainer, folders[1], Net())


@pytest.mark.parametrize("part", ["", "args", "state", "control", "callback_handler"])
def test_each_attribute_of_a_trained_trainer_can_be_read(both: tuple[Any, Any], part: str) -> None:
    theirs, ours = (getattr(trainer, part) if part else trainer for trainer in both)
    names = set(dir(theirs)) - EXCEPTIONS.keys()
    assert names - set(dir(ours)) == set()
    for name in names:
        getattr(ours, name)


def test_the_exceptions_are_not_there(both: tuple[Any, Any]) -> None:
    theirs, ours = both
    assert EXCEPTIONS.keys() <= {*dir(theirs), *dir(theirs.args)}
    assert not [name for name in EXCEPTIONS if name in dir(ours) or name in dir(ours.args)]


def test_values_that_libraries_read_are_those_of_transformers(both: tuple[Any, Any]) -> None:
    names = """
        deepspeed is_deepspeed_enabled is_fsdp_enabled is_model_parallel is_distributed_loading_by_transformers
        place_model_on_device _loss_shifts_labels _created_lr_scheduler _initial_global_step _initial_num_input_tokens_seen
        model_accepts_loss_kwargs label_names can_return_loss _globalstep_last_logged loss_is_scaled_for_ga is_in_train
        current_gradient_accumulation_steps label_smoother hp_name hp_search_backend _train_batch_size hub_model_id
    """.split()  # noqa: SIM905 - one name a line would be half a page
    theirs, ours = ({name: getattr(trainer, name) for name in names} for trainer in both)
    assert ours == theirs
    assert both[1].push_in_progress is None  # transformers sets it with push_to_hub only
    args = """
        default_optim fsdp_plugin_args deepspeed_plugin _setup_devices _no_sync_in_gradient_accumulation parallel_mode
    """.split()  # noqa: SIM905
    theirs, ours = ({name: str(getattr(trainer.args, name)) for name in args} for trainer in both)
    assert ours == theirs
    for flag in ("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"):
        assert not any(getattr(trainer, flag) for trainer in both)
    losses = [float(trainer._tr_loss) for trainer in both]  # nothing was logged before the end
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # float32 there


def test_classes_and_enumerations_have_the_members_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("Seq2SeqTrainer", "Seq2SeqTrainingArguments", "TrainerCallback", "EarlyStoppingCallback"):
        assert set(dir(getattr(transformers, name))) - EXCEPTIONS.keys() <= set(dir(getattr(echelon.trainer, name)))
    for module, name in (
        ("training_args", "OptimizerNames"),
        ("training_args", "ParallelMode"),
        ("trainer_utils", "SchedulerType"),
        ("trainer_utils", "IntervalStrategy"),
        ("trainer_utils", "SaveStrategy"),
        ("trainer_utils", "HubStrategy"),
    ):
        theirs: type[Enum] = getattr(getattr(transformers, module), name)
        ours: type[Enum] = getattr(echelon.trainer.arguments.enums, name)
        assert {one.name: one.value for one in theirs}.items() <= {one.name: one.value for one in ours}.items()


def test_names_of_older_releases_are_there(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    assert {name: getattr(args, name) for name in OLDER} == OLDER
    with pytest.raises(ConfigError, match=r"optim='adamw_apex_fused' is not supported: it needs apex"):
        TrainingArguments(str(tmp_path), use_cpu=True, optim=OptimizerNames.ADAMW_APEX_FUSED)


def test_the_module_of_the_accelerator_has_the_classes_that_libraries_replace_there() -> None:
    import echelon.accelerator as module

    assert (module.AcceleratorState, module.ParallelismConfig) == (AcceleratorState, ParallelismConfig)


def test_a_subclass_says_whether_its_loss_shifts_the_labels(tmp_path: Path) -> None:
    class Shifts(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._loss_shifts_labels = True
            self.model_accepts_loss_kwargs = True

    trainer = Shifts(Net(), arguments(tmp_path))
    batch = {"labels": torch.tensor([[1, 2, 2], [3, -100, 1]])}
    assert int(trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1]) == 3


def test_a_scheduler_that_was_created_for_other_steps_is_created_again(tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=1.0, lr_scheduler_type="linear", optim="sgd")
    trainer = Trainer(Net(), args, train_dataset=net_data(8))
    trainer.create_optimizer_and_scheduler(num_training_steps=100)
    assert trainer._created_lr_scheduler
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0  # after 4 of 4 steps, not of 100


def test_memory_is_measured_by_an_override_in_the_way_of_transformers(tmp_path: Path) -> None:
    class Measures(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self._memory_tracker.start()
            metrics: dict[str, Any] = {}
            self._memory_tracker.stop_and_update_metrics(metrics)
            return metrics

    found = Measures(Net(), arguments(tmp_path, skip_memory_metrics=False)).evaluate()
    assert {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta", "init_mem_cpu_alloc_delta"} <= found.keys()
    assert Measures(Net(), arguments(tmp_path)).evaluate() == {}


def test_a_state_takes_what_a_training_begins_with(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path))
    trainer.hp_name = lambda trial: f"trial {trial['seed']}"
    state = TrainerState()
    state.init_training_references(trainer, 12, 3, {"seed": 3})
    assert (state.trial_name, state.trial_params) == ("trial 3", {"seed": 3})
    assert (state.max_steps, state.num_train_epochs, state.is_world_process_zero) == (12, 3, True)


def test_tokens_per_second_after_a_resume_are_those_of_this_run(tmp_path: Path) -> None:
    rows = [
        {"x": row["x"], "input_ids": torch.zeros(5, dtype=torch.long), "labels": row["labels"]} for row in net_data(8)
    ]
    options: dict[str, Any] = {"logging_steps": 1, "include_num_input_tokens_seen": "all", "save_strategy": "steps"}
    options |= {"save_steps": 2, "remove_unused_columns": False}

    class Ignores(Net):
        main_input_name = "input_ids"

        def forward(self, x: Any, labels: Any = None, input_ids: Any = None) -> Any:
            return super().forward(x, labels)

    Trainer(Ignores(), arguments(tmp_path, max_steps=2, **options), train_dataset=rows).train()
    trainer = Trainer(Ignores(), arguments(tmp_path, max_steps=4, **options), train_dataset=rows)
    trainer.train(resume_from_checkpoint=True)
    entries = [entry for entry in trainer.state.log_history if "train_tokens_per_second" in entry and entry["step"] > 2]
    assert len(logged(trainer)) == 4
    assert [entry["num_input_tokens_seen"] for entry in entries] == [30, 40]  # 2 rows of 5 tokens a step
    for entry, num_tokens in zip(entries, (10, 20)):
        rate = num_tokens / entry["train_runtime"]
        assert entry["train_tokens_per_second"] == pytest.approx(rate, rel=0.1)  # the runtime has four digits
