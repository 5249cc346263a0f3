"""TrainingArguments: the fields of transformers in their order, its rules, old names, and clear refusals."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import pickle
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.trainer import ParallelMode, Seq2SeqTrainingArguments, TrainingArguments
from echelon.trainer.optim.optimizers import optimizer_class_and_arguments

# Those that transformers has not.
OWN: dict[str, Any] = {
    "engine": None,
    "max_time": None,
    "fast_dev_run": 0,
    "limit_train_batches": None,
    "limit_eval_batches": None,
    "stop_on_nan": False,
    "pack_to_length": None,
    "loss_chunk": None,
    "ema_decay": None,
    "swa_start": None,
    "average_every": 1,
    "checkpoint_format": None,
    "save_best": None,
    "save_blocking": True,
    "max_failed_saves": 3,
    "save_on_exception": False,
    "save_on_signal": False,
    "parity": None,
    "global_batch_size": None,
    "max_micro_batch_size": None,
    "canonical_shards": None,
    "verify_every": None,
    "speed": None,
    "verify_action": None,
    "spike_guard": None,
    "spike_factor": None,
    "already_sharded": None,
    "allow_changed_data": False,
    "log_throughput": False,
    "plan": False,
    "memory_snapshot": None,
    "pipeline_schedule": "1F1B",
    "pipeline_num_micro_batches": None,
    "master_weights": None,
    "activation_checkpointing_blocks": None,
    # transformers before 5.15 has these
    "logging_dir": None,
    "warmup_ratio": None,
}


def _fields(kind: Any) -> dict[str, Any]:
    """Return the fields in the order in which positional arguments are read, and their defaults."""
    return {
        item.name: item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        for item in dataclasses.fields(kind)
    }


def test_fields_and_defaults_are_those_of_transformers_in_their_order() -> None:
    theirs = _fields(pytest.importorskip("transformers").TrainingArguments)  # 5.23, as in constraints.txt
    assert list(_fields(TrainingArguments).items()) == [*theirs.items(), *OWN.items()]
    # A class derived from this one has its own positions.
    assert {item.name for item in dataclasses.fields(TrainingArguments) if item.kw_only} == OWN.keys()


def test_every_field_has_a_help_text_for_argument_parsers() -> None:
    assert [item.name for item in dataclasses.fields(TrainingArguments) if not item.metadata.get("help")] == []


def test_the_signature_is_that_of_the_fields() -> None:
    assert list(inspect.signature(TrainingArguments).parameters) == [*_fields(TrainingArguments)]
    assert TrainingArguments("out", 4, 2.0).num_train_epochs == 2.0


@pytest.mark.parametrize(
    ("old", "field", "value"),
    [
        ({"group_by_length": True}, "train_sampling_strategy", "group_by_length"),
        ({"include_inputs_for_metrics": True}, "include_for_metrics", ["inputs"]),
        ({"include_tokens_per_second": True}, "include_num_input_tokens_seen", "all"),
        ({"fsdp_transformer_layer_cls_to_wrap": "Block"}, "fsdp_config", {"transformer_layer_cls_to_wrap": "Block"}),
        ({"evaluation_strategy": "epoch"}, "eval_strategy", "epoch"),
        ({"evaluate_during_training": True}, "eval_strategy", "steps"),
        ({"warmup_ratio": 0.1}, "warmup_steps", 0.1),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, "warmup_steps", 0.1),
        ({"warmup_ratio": 0.1, "warmup_steps": 20}, "warmup_steps", 20),
        ({"group_by_length": False}, "train_sampling_strategy", "random"),
        ({"no_cuda": True}, "use_cpu", True),
        ({"per_gpu_train_batch_size": 3}, "per_device_train_batch_size", 3),
        ({"per_gpu_eval_batch_size": 3}, "per_device_eval_batch_size", 3),
        ({"include_inputs_for_metrics": False}, "include_for_metrics", []),
        ({"include_tokens_per_second": False}, "include_num_input_tokens_seen", "no"),
        ({"push_to_hub_token": "t"}, "hub_token", "t"),
        ({"push_to_hub_model_id": "m"}, "hub_model_id", "m"),
        ({"adafactor": True}, "optim", "adafactor"),
        ({"optim": "adamw_hf"}, "optim", "adamw_torch"),
        ({"split_batches": True}, "accelerator_config", {"split_batches": True}),
        ({"dispatch_batches": False}, "accelerator_config", {"dispatch_batches": False}),
        ({"fsdp_min_num_params": 5}, "fsdp_config", {"min_num_params": 5}),
        ({"logging_dir": "logs"}, "logging_dir", "logs"),
    ],
)
def test_an_old_name_means_its_new_one_and_is_told_once(old: dict[str, Any], field: str, value: Any) -> None:
    with pytest.warns(EchelonWarning) as told:
        args = TrainingArguments(**old)
    assert getattr(args, field) == value
    assert len(told) == 1
    assert told[0].filename == __file__  # the user's line, not ours
    name, text = next(iter(old)), str(told[0].message)
    assert name in text
    assert field in text or field == "logging_dir"


@pytest.mark.parametrize(
    "name", ["overwrite_output_dir", "save_safetensors", "use_mps_device", "half_precision_backend"]
)
def test_an_old_name_without_effect_is_told(name: str) -> None:
    with pytest.warns(EchelonWarning, match=rf"{name}= has no effect: "):
        TrainingArguments(**{name: True})


def test_old_names_work_for_classes_of_the_user_s(tmp_path: Path) -> None:
    @dataclass
    class Mine(TrainingArguments):
        extra: int = 1

    with pytest.warns(EchelonWarning, match="eval_strategy"):
        args = Mine(output_dir=str(tmp_path), evaluation_strategy="steps", extra=2)
    assert (args.eval_strategy, args.extra) == ("steps", 2)
    ours = [name for name in _fields(TrainingArguments) if name not in OWN]
    assert list(inspect.signature(Mine).parameters) == [*ours, "extra", *OWN]


def test_an_old_and_its_new_name_must_agree() -> None:
    with pytest.warns(EchelonWarning), pytest.raises(ConfigError, match="is the old name of"):
        TrainingArguments(evaluation_strategy="epoch", eval_strategy="steps")


def test_new_names_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainingArguments(eval_strategy="epoch", warmup_steps=0.1, report_to=[])


def test_an_unknown_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="has no setting 'learning_rat'") as error:
        TrainingArguments(learning_rat=1e-3)  # type: ignore[call-arg]
    assert "did you mean 'learning_rate'?" in str(error.value)


def test_a_mistyped_mode_gets_the_modes() -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments(gradient_checkpointing="selectiv")  # type: ignore[arg-type]
    assert "do:    set it to true or false, or to one of none, full, selective, offload" in str(error.value)


def test_what_is_not_offered_is_refused_not_ignored() -> None:
    with pytest.raises(ConfigError, match=r"trackio_static_space_id='me/it' is not supported by echelon") as error:
        TrainingArguments(trackio_static_space_id="me/it")
    assert "do: " in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_strategy": "epochs"}, "eval_strategy='epochs' is not one of no, steps, epoch"),
        ({"save_strategy": "sometimes"}, "save_strategy='sometimes' is not one of no, steps, epoch, best"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type='cosin' is not one of linear, cosine"),
        ({"optim": "adam"}, "optim='adam' is not one of adamw_torch"),
        ({"optim": "adalomo"}, "optim='adalomo' is not supported: it steps during the backward pass"),
        ({"optim": "adamw_torch_xla"}, "echelon does not run on TPUs"),
        ({"optim": "apollo_adamw_layerwise"}, "optim='apollo_adamw_layerwise' is not supported"),
        ({"optim": "galore_adamw_8bit_layerwise"}, "optim='galore_adamw_8bit_layerwise' is not supported"),
        ({"report_to": "wandbb"}, "report_to='wandbb' is not one of tensorboard, wandb"),
        ({"report_to": ["neptune"]}, "report_to='neptune' is not supported by echelon"),
        ({"debug": "underflow"}, "debug='underflow' is not one of underflow_overflow"),
        ({"include_for_metrics": ["losses"]}, "include_for_metrics='losses' is not one of inputs, loss"),
        ({"include_num_input_tokens_seen": "some"}, "not one of no, all, non_padding"),
        ({"label_smoothing_factor": 1.0}, "label_smoothing_factor=1.0 is not in"),
        ({"bf16_full_eval": True, "fp16_full_eval": True}, "fp16_full_eval and bf16_full_eval are mutually exclusive"),
        ({"limit_train_batches": 1.5}, "limit_train_batches=1.5 is neither a number of batches"),
        ({"limit_eval_batches": 0}, "limit_eval_batches=0 is neither a number of batches"),
        ({"max_time": "soon"}, "max_time='soon' is not a positive duration"),
        ({"fsdp": "full_shards"}, "'full_shards' is not one of full_shard, shard_grad_op"),
        ({"fsdp": "full_shard shard_grad_op"}, "names two strategies"),
        ({"fsdp": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, "fsdp and deepspeed are mutually exclusive"),
        ({"train_sampling_strategy": "length"}, "not one of random, sequential"),
        ({"log_level": "loud"}, "log_level='loud' is not one of debug, info"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are mutually exclusive"),
        ({"logging_steps": 2.5}, "logging_steps=2.5 is neither a whole number of steps"),
        ({"logging_steps": 0}, "needs a positive logging_steps, not 0"),
        (
            {"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0},
            "needs a positive eval_steps or logging_steps",
        ),
        ({"warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
        ({"dataloader_prefetch_factor": 2}, "needs data loader workers"),
        ({"save_strategy": "best"}, "needs metric_for_best_model"),
        ({"load_best_model_at_end": True}, "eval_strategy='no' and save_strategy='steps'"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 200, "save_steps": 300},
            "save_steps=300 is not a multiple of eval_steps=200",
        ),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "depends on an evaluation metric, but eval_strategy is 'no'"),
        ({"lr_scheduler_type": "greedy"}, "depends on an evaluation metric, but eval_strategy is 'no'"),
        ({"torch_empty_cache_steps": 0}, "torch_empty_cache_steps=0 is not a positive whole number"),
        ({"torch_empty_cache_steps": 2.0}, "torch_empty_cache_steps=2.0 is not a positive whole number"),
        ({"accelerator_config": "missing.json"}, "neither a JSON string nor a readable JSON file"),
        ({"optim_args": "lr"}, "has no value"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        optimizer_class_and_arguments(TrainingArguments(**options))
    assert message in str(error.value)
    assert "where: " in str(error.value)


def test_what_follows_from_the_values(tmp_path: Path) -> None:
    args = TrainingArguments(eval_strategy="steps", logging_steps=7, use_cpu=True)
    assert (args.eval_steps, args.do_eval, args.dataloader_pin_memory) == (7, True, False)
    assert args.output_dir == "trainer_output"
    assert TrainingArguments(output_dir="~/x").output_dir == str(Path.home() / "x")
    assert not (tmp_path / "trainer_output").exists()
    best = TrainingArguments(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert (best.metric_for_best_model, best.greater_is_better) == ("loss", False)
    assert TrainingArguments(metric_for_best_model="accuracy").greater_is_better is True
    assert TrainingArguments(eval_strategy=False).eval_strategy == "no"  # type: ignore[arg-type]
    assert TrainingArguments(lr_scheduler_kwargs='{"num_cycles": 2}').lr_scheduler_kwargs == {"num_cycles": 2}
    assert TrainingArguments(gradient_checkpointing=False).activation_checkpointing is False
    compiled = TrainingArguments(torch_compile_mode="reduce-overhead")
    assert (compiled.torch_compile, compiled.torch_compile_backend) == (True, "inductor")
    assert TrainingArguments(report_to=None).report_to == TrainingArguments(report_to="none").report_to == []
    assert TrainingArguments(debug="underflow_overflow").debug == ["underflow_overflow"]
    assert [TrainingArguments(warmup_steps=w).get_warmup_steps(25) for w in (0, 7, 0.1)] == [0, 7, 3]


def test_groups_of_settings_are_set_at_once() -> None:
    args = TrainingArguments(use_cpu=True)
    assert args.set_training(learning_rate=1e-3, batch_size=4, seed=7, activation_checkpointing=True) is args
    args.set_evaluate(strategy="steps", steps=50, batch_size=3, accumulation_steps=2, delay=1.0, loss_only=True)
    args.set_save(strategy="epoch", total_limit=2, on_each_node=True)
    args.set_logging(strategy="epoch", report_to=["jsonl"], level="info", first_step=True)
    args.set_push_to_hub("me/it", strategy="end", token="secret", private_repo=True)
    args.set_optimizer(name="sgd", learning_rate=0.1, weight_decay=0.2, beta1=0.8, args="momentum=0.9")
    args.set_lr_scheduler(name="cosine", num_epochs=2, warmup_steps=0.1)
    args.set_dataloader(train_batch_size=5, eval_batch_size=6, drop_last=True, num_workers=1, sampler_seed=3)
    values = args.to_dict()
    expected = {
        "do_train": True, "seed": 7, "gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 50,
        "do_eval": True, "eval_accumulation_steps": 2, "eval_delay": 1.0, "prediction_loss_only": True,
        "save_strategy": "epoch", "save_total_limit": 2, "save_on_each_node": True, "logging_strategy": "epoch",
        "report_to": ["jsonl"], "log_level": "info", "push_to_hub": True, "hub_model_id": "me/it", "hub_strategy": "end",
        "optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.2, "adam_beta1": 0.8, "optim_args": "momentum=0.9",
        "lr_scheduler_type": "cosine", "num_train_epochs": 2, "warmup_steps": 0.1, "per_device_train_batch_size": 5,
        "per_device_eval_batch_size": 6, "dataloader_drop_last": True, "dataloader_num_workers": 1, "data_seed": 3,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    args.set_testing(batch_size=9)
    assert (args.do_predict, args.per_device_eval_batch_size) == (True, 9)


def test_the_argument_parser_of_transformers_reads_every_field(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = (
        "--output_dir out --eval_strategy epoch --fp16 --logging_steps 0.5 --max_time 90m --no_remove_unused_columns"
    )
    more = ["--lr_scheduler_kwargs", '{"num_cycles": 2}', "--label_names", "a", "b", "--report_to", "jsonl"]
    for kind in (TrainingArguments, Seq2SeqTrainingArguments):
        (args,) = transformers.HfArgumentParser(kind).parse_args_into_dataclasses([*words.split(), *more])
        assert (args.eval_strategy, args.fp16, args.logging_steps) == ("epoch", True, 0.5)
        assert (args.lr_scheduler_kwargs, args.label_names, args.report_to) == (
            {"num_cycles": 2},
            ["a", "b"],
            ["jsonl"],
        )
        assert (args.max_time, args.remove_unused_columns) == (timedelta(minutes=90), False)
        (tmp_path / "args.json").write_text('{"output_dir": "out", "warmup_steps": 3, "fsdp": "full_shard"}')
        (args,) = transformers.HfArgumentParser(kind).parse_json_file(tmp_path / "args.json")
        assert (args.warmup_steps, args.fsdp) == (3, "full_shard")


def test_an_argument_parser_finds_the_old_names_that_transformers_had_as_fields() -> None:
    # LLaMA-Factory's examples set warmup_ratio in a file, which HfArgumentParser.parse_dict compares with the fields.
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser(TrainingArguments)
    with pytest.warns(EchelonWarning, match="warmup_ratio= was renamed to warmup_steps="):
        (args,) = parser.parse_dict({"output_dir": "out", "warmup_ratio": 0.1, "logging_dir": None})
    assert (args.warmup_steps, args.warmup_ratio, args.logging_dir) == (0.1, None, None)
    with pytest.warns(EchelonWarning):
        (args,) = parser.parse_args_into_dataclasses(["--warmup_ratio", "0.2", "--logging_dir", "logs"])
    assert (args.warmup_steps, args.logging_dir) == (0.2, "logs")
    (args,) = parser.parse_args_into_dataclasses(["--warmup_steps", "3"])  # without a warning
    assert args.warmup_steps == 3

    @dataclass
    class Arguments(TrainingArguments):  # as ms-swift's
        warmup_ratio: float = 0.0

    assert Arguments(warmup_steps=3).warmup_steps == 3  # without a warning
    with pytest.warns(EchelonWarning, match="warmup_ratio"):
        assert Arguments(warmup_ratio=0.3).warmup_steps == 0.3


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90), ("90", 90), ("1.5h", 5400), ("90m", 5400), ("2d", 172_800), ("1:30", 90), ("01:00:30", 3630)]
    + [("1:00:00:01", 86_401), (timedelta(minutes=1), 60)],
)
def test_a_duration_is_written_in_many_ways(given: Any, seconds: int) -> None:
    assert TrainingArguments(max_time=given).max_time == timedelta(seconds=seconds)


def test_trying_out_changes_what_would_take_long() -> None:
    args = TrainingArguments(
        fast_dev_run=True, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, report_to="jsonl"
    )
    assert (args.max_steps, args.limit_train_batches, args.limit_eval_batches) == (1, 1, 1)
    assert (args.save_strategy, args.report_to, args.load_best_model_at_end) == ("no", [], False)
    assert [args.batches_of(limit, range(10)) for limit in (None, 3, 0.25, 0.01)] == [None, 3, 2, 1]
    with pytest.raises(ConfigError, match="the data has no length"):
        args.batches_of(0.5, iter([]))


def test_one_process_of_each_machine_saves_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    second = SimpleNamespace(process_index=2, local_process_index=0)
    monkeypatch.setattr(TrainingArguments, "distributed_state", second)
    assert TrainingArguments(save_on_each_node=True).should_save
    assert not TrainingArguments().should_save


def test_who_this_process_is() -> None:
    # Old launchers pass local_rank; the environment says who this is.
    args = TrainingArguments(use_cpu=True, per_device_train_batch_size=4, local_rank=3)
    assert (args.device, args.n_gpu, args.world_size) == (torch.device("cpu"), 0, 1)
    assert (args.process_index, args.local_process_index) == (0, 0)
    assert (args.train_batch_size, args.eval_batch_size) == (4, 8)
    args._n_gpu = 3  # type: ignore[misc]  # scripts of others set it
    assert args.n_gpu == 3
    assert (args.train_batch_size, args.eval_batch_size) == (12, 24)
    assert args.parallel_mode is ParallelMode.NOT_DISTRIBUTED
    args._n_gpu = 1  # type: ignore[misc]
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert args.should_log
    assert args.should_save
    assert TrainingArguments(log_level="info").get_process_log_level() == logging.INFO
    with args.main_process_first(desc="nothing"):
        pass


def test_as_a_dict_names_are_words_and_secrets_are_hidden() -> None:
    args = TrainingArguments(hub_token="secret", eval_strategy="epoch")
    values = args.to_dict()
    assert (values["eval_strategy"], values["optim"], values["hub_token"]) == (
        "epoch",
        "adamw_torch_fused",
        "<HUB_TOKEN>",
    )
    assert "secret" not in args.to_json_string() + str(args)
    assert json.loads(args.to_json_string())["seed"] == 42
    assert args.to_sanitized_dict()["label_names"] == "None"


def test_arguments_can_be_copied_and_pickled() -> None:
    args = TrainingArguments(learning_rate=0.1)
    assert dataclasses.replace(args, seed=1).learning_rate == 0.1
    assert pickle.loads(pickle.dumps(args)) == args
