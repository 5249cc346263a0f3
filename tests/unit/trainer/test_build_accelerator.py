"""Settings of TrainingArguments that are handed on: to loaders, the Accelerator, trackers and the Hub."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.accelerator import Accelerator
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.base.errors import ConfigError
from echelon.trainer import Trainer, TrainingArguments, build_accelerator
from echelon.trainer.callbacks.trackers import CSVCallback, TrackerCallback, add_split_prefixes
from echelon.trainer.features.hub import HubUpload
from tests.trainer_models import DATA, Line


class Configured(Line):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True, to_dict=lambda: {"layers": 1})


def _args(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(**{"output_dir": str(folder), **defaults, **options})


def test_loaders_are_made_as_the_settings_say(tmp_path: Path) -> None:
    args = _args(
        tmp_path, per_device_train_batch_size=4, dataloader_drop_last=True, dataloader_num_workers=1,
        dataloader_persistent_workers=True, dataloader_prefetch_factor=3,
        dataloader_multiprocessing_context="spawn", dataloader_in_order=False,
    )  # fmt: skip
    loader = Trainer(Configured(), args, train_dataset=DATA).get_train_dataloader()
    inner: Any = getattr(loader, "base_dataloader", loader)
    assert (len(loader), inner.num_workers, inner.persistent_workers, inner.prefetch_factor) == (2, 1, True, 3)
    assert (inner.multiprocessing_context.get_start_method(), inner.in_order) == ("spawn", False)
    assert inner.pin_memory is False  # there is no accelerator; torch would warn


def test_the_accelerator_gets_what_belongs_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def make(**options: Any) -> Accelerator:
        seen.update(options)
        return Accelerator(cpu=True)

    monkeypatch.setattr(build_accelerator, "Accelerator", make)
    Trainer(
        Configured(),
        _args(
            tmp_path, ddp_find_unused_parameters=True, ddp_bucket_cap_mb=7, ddp_broadcast_buffers=False, bf16=True,
            ddp_static_graph=True, ddp_backend="gloo", ddp_timeout=90, data_seed=5,
            accelerator_config={"split_batches": True, "even_batches": False},
            fsdp="shard_grad_op offload", fsdp_config={"fsdp_transformer_layer_cls_to_wrap": "Linear", "xla": False},
            parallelism_config={"dp_shard_size": 2},
        ),
    )  # fmt: skip
    ddp, group = seen["kwargs_handlers"]
    assert (ddp.find_unused_parameters, ddp.bucket_cap_mb, ddp.broadcast_buffers, ddp.static_graph) == (
        True,
        7,
        False,
        True,
    )
    assert (group.backend, group.timeout) == ("gloo", timedelta(seconds=90))
    assert (seen["mixed_precision"], seen["cpu"]) == ("bf16", True)
    data = seen["dataloader_config"]
    assert (data.split_batches, data.even_batches, data.use_seedable_sampler, data.data_seed) == (True, False, True, 5)
    plugin = seen["fsdp_plugin"]
    assert (plugin.fsdp_version, plugin.sharding_strategy.name) == (2, "SHARD_GRAD_OP")
    assert plugin.transformer_cls_names_to_wrap == ["Linear"]
    assert type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    assert (type(seen["parallelism_config"]), seen["parallelism_config"].dp_shard_size) == (ParallelismConfig, 2)
    for options, message in (
        ({"fsdp": True, "fsdp_config": {"min_num_param": 3}}, "fsdp_config has no key 'min_num_param'"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "is for TPUs"),
        ({"parallelism_config": {"dp": 2}}, "parallelism_config has no key 'dp'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(Configured(), _args(tmp_path, **options))
    Trainer(Configured(), _args(tmp_path, fsdp="", fsdp_config={"min_num_params": 0}))
    assert seen["fsdp_plugin"] is None


def test_full_determinism_switches_torch_to_it(tmp_path: Path) -> None:
    try:
        Trainer(Configured(), _args(tmp_path, full_determinism=True))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_use_cache_is_that_of_the_arguments(tmp_path: Path) -> None:
    for wanted in (False, True):
        model = Configured()
        Trainer(model, _args(tmp_path, use_cache=wanted))
        assert model.config.use_cache is wanted


def test_who_speaks_and_how_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(log_level="info", log_level_replica="error")
    second = SimpleNamespace(process_index=2, local_process_index=0)
    monkeypatch.setattr(TrainingArguments, "distributed_state", second)
    assert args.get_process_log_level() == logging.INFO
    args.log_on_each_node = False  # one in all, which is another one
    assert not args.should_log
    assert args.get_process_log_level() == logging.ERROR


def test_an_evaluation_before_the_first_step_and_one_of_the_loss_only(tmp_path: Path) -> None:
    asked = []

    class Looks(Trainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            asked.append(prediction_loss_only)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    args = _args(tmp_path, eval_on_start=True, eval_strategy="epoch", num_train_epochs=1, prediction_loss_only=True)
    trainer = Looks(Configured(), args, train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [0, 2]
    assert trainer.predict(DATA).predictions is None
    assert set(asked) == {True}


def test_trackers_get_the_project_and_the_run(tmp_path: Path) -> None:
    started: dict[str, Any] = {}
    logged = []

    class Stands:
        log_with = ("trackio", "wandb", "jsonl")

        def init_trackers(self, project: str, config: Any, init_kwargs: Any) -> None:
            started.update(project=project, config=config, more=init_kwargs)

        def log(self, values: Any, step: int) -> None:
            logged.append((values, step))

    args = _args(
        tmp_path, project="mine", run_name="first", trackio_space_id="me/space", trackio_bucket_id="me/bucket", seed=3
    )
    stands: Any = Stands()
    callback = TrackerCallback(lambda: stands, tmp_path / "runs")
    state = SimpleNamespace(global_step=7)
    callback.on_log(args, state, None, logs={"loss": 0.5, "eval_f1": 1.0, "note": "text"}, model=Configured())
    callback.on_train_begin(args, state, None)
    assert (started["project"], started["config"]["seed"], started["config"]["model/layers"]) == ("mine", 3, "1")
    assert started["more"] == {
        "wandb": {"name": "first"},
        "trackio": {"space_id": "me/space", "bucket_id": "me/bucket", "name": "first"},
    }
    assert logged == [({"train/loss": 0.5, "eval/f1": 1.0}, 7)]
    assert add_split_prefixes({"test_loss": 1, "epoch": 2}) == {"test/loss": 1, "train/epoch": 2}


def test_an_upload_that_runs_lets_the_next_one_pass_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    running: Future[str] = Future()

    def upload(**options: Any) -> Future[str]:
        sent.append(options)
        return running

    module: Any = ModuleType("huggingface_hub")
    module.create_repo = lambda **options: SimpleNamespace(repo_id="me/it")
    module.upload_folder = upload
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", module)
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    for always, count in ((False, 1), (True, 2)):
        sent.clear()
        hub = HubUpload(_args(tmp_path, hub_always_push=always, hub_revision="draft"), tmp_path)
        assert hub.upload_checkpoint(checkpoint, step=1, before=int)
        assert hub.upload_checkpoint(checkpoint, step=2, before=int) is always
        assert [one["revision"] for one in sent] == ["draft"] * count
    running.set_exception(OSError("no network"))
    with pytest.raises(OSError, match="no network"):
        hub.wait()


def test_what_scripts_and_subclasses_ask_the_trainer(tmp_path: Path) -> None:
    class Counts(Configured):
        def floating_point_ops(self, inputs: Any) -> float:
            return 100.0

    args = _args(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, learning_rate=0.5)
    trainer = Trainer(Counts(), args, train_dataset=DATA, eval_dataset=DATA)
    kind, given = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
    assert (kind, given["lr"]) == (torch.optim.AdamW, 0.5)
    assert trainer.get_decay_parameter_names(trainer.model) == ["layer.weight"]
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    assert trainer.create_optimizer() is trainer.optimizer
    assert trainer.create_scheduler(2) is trainer.lr_scheduler
    assert trainer.get_learning_rates() == [0.5, 0.5]  # weights, and biases
    assert trainer.get_optimizer_group("layer.weight") is trainer.optimizer.param_groups[0]
    assert len(trainer.get_optimizer_group()) == 2
    assert (trainer.get_num_trainable_parameters(), trainer.get_total_train_batch_size(args)) == (2, 4)
    loader = trainer.get_train_dataloader()
    assert (trainer.num_examples(loader), len(trainer.get_test_dataloader(DATA[:3]))) == (10, 1)
    assert trainer.set_initial_training_values(args, loader) == (1, 3, 10, 8, 4, 5, 2)
    assert trainer.is_local_process_zero()
    assert trainer.is_world_process_zero()
    with trainer.autocast_smart_context_manager(), trainer.compute_loss_context_manager():
        assert trainer.floating_point_ops(DATA[0]) == 100.0
    trainer.store_flos()
    assert (trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()) == (1, 1, 1)
    metrics = trainer.train().metrics
    assert metrics["total_flos"] == trainer.state.total_flos == 400.0
    (tmp_path / "runs").mkdir()
    trainer.save_state()
    assert (tmp_path / "trainer_state.json").is_file()
    assert trainer.metrics_format({"total_flos": 2.0**31}) == {"total_flos": "2GF"}
    trainer.add_callback(CSVCallback(tmp_path))
    trainer.remove_callback(CSVCallback)
    assert not any(isinstance(one, CSVCallback) for one in trainer.callback_handler.callbacks)
    before = trainer.accelerator
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator is not before
    trainer.end()


def test_overrides_of_the_data_s_methods_are_used(tmp_path: Path) -> None:
    seen: dict[str, Any] = {"sizes": []}

    class Backwards(Trainer):
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return list(reversed(range(len(eval_dataset))))

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            seen["sizes"].append((num_batches, len(samples), count))
            return samples, count

        def call_model_init(self, trial: Any = None) -> nn.Module:
            seen["trial"] = trial
            return super().call_model_init(trial)

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}

    args = _args(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1)
    trainer = Backwards(model_init=Configured, args=args, train_dataset=DATA, data_collator=collate)
    trainer.train()
    assert seen == {"sizes": [(2, 2, None), (1, 1, None)], "trial": None}
    assert trainer.predict(DATA).label_ids.tolist() == [2.0 * i for i in reversed(range(10))]


def test_labels_are_counted_on_one_rank_or_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed = []
    for wanted in (False, True):
        model = Configured()
        model.accepts_loss_kwargs = True  # type: ignore[assignment]
        trainer = Trainer(model, _args(tmp_path, average_tokens_across_devices=wanted))
        monkeypatch.setattr(trainer.accelerator.session, "num_readers", 2)
        monkeypatch.setattr(trainer.accelerator, "reduce", lambda count, how: summed.append(how) or count * 2)
        batch = {"labels": torch.tensor([1, -100, 3])}
        _, count = trainer.get_batch_samples(iter([batch, batch]), 2, torch.device("cpu"))
        assert int(count) == (8 if wanted else 4)
        monkeypatch.undo()
    assert summed == ["sum"]
