"""Trainer options on which two ranks must agree."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from echelon.base.errors import ConfigError, DesyncError, UsageError
from echelon.trainer import EvalPrediction, NonFiniteError, Trainer, TrainerCallback, TrainingArguments
from echelon.trainer.callbacks.built_in import TimeLimitCallback
from echelon.trainer.features.hyperparameter_search import BestRun
from tests.harness import RanksFailed, run_on_ranks
from tests.trainer_models import CONSTANT_SGD, Net, arguments, net_data, stacked, train_rows_plainly


def _args(folder: str, **options: Any) -> TrainingArguments:
    return arguments(folder, **{**CONSTANT_SGD, "per_device_eval_batch_size": 2, "logging_steps": 1, **options})


def _plain(n: int, batch_size: int, rate: float = 0.1) -> nn.Module:
    """Train for one epoch by a plain loop with the batches of both ranks."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return train_rows_plainly(model, net_data(n), batch_size=batch_size, seed=42, optimizer=optimizer).model


def _evaluate_by_batches(folder: str) -> tuple[dict[str, float], list[bool], list[int], int]:
    kept, calls, inputs = [], [], []

    def metrics(result: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        kept.append((result.predictions.argmax(-1) == result.label_ids).double())
        inputs.append(len(result.inputs))
        calls.append(compute_result)
        return {"accuracy": torch.cat(kept).mean().item()} if compute_result else {}

    args = _args(folder, batch_eval_metrics=True, include_for_metrics=["inputs"], include_num_input_tokens_seen="all")
    trainer = Trainer(Net(), args, train_dataset=net_data(8), eval_dataset=net_data(7), compute_metrics=metrics)
    found = trainer.evaluate()
    trainer.train()
    return found, calls, inputs, trainer.state.num_input_tokens_seen


def test_metrics_by_batches_and_tokens_are_those_of_all_ranks(tmp_path: Path) -> None:
    x, labels = stacked(net_data(7))
    logits = Net()(x)["logits"]
    for found, calls, inputs, tokens in run_on_ranks(_evaluate_by_batches, str(tmp_path), world_size=2):
        assert found["eval_accuracy"] == (logits.argmax(-1) == labels).double().mean().item()
        assert found["eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-13)
        assert (calls, inputs) == ([False, True], [4, 3])
        assert tokens == 8 * 6


def _stop_by_one_clock(folder: str) -> tuple[int, int]:
    trainer = Trainer(Net(), _args(folder, max_time="1h"), train_dataset=net_data(32))
    limit = trainer.pop_callback(TimeLimitCallback)
    assert isinstance(limit, TimeLimitCallback)
    rank, looks = trainer.args.process_index, [0]

    def clock() -> float:
        looks[0] += 1
        return 4000.0 if rank == 1 and looks[0] > 3 else 0.0  # on rank 1, the time is over at the third step

    assert trainer.args.max_time is not None
    trainer.add_callback(TimeLimitCallback(trainer.args.max_time, trainer.accelerator, clock=clock))
    return trainer.train().global_step, trainer.state.max_steps


def test_a_time_limit_on_one_rank_ends_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    assert run_on_ranks(_stop_by_one_clock, str(tmp_path), world_size=2) == [(3, 8)] * 2


def _meet_a_nan(folder: str) -> None:
    data = net_data(16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(42)).tolist()
    data[order[6]]["x"][3] = math.nan  # in the second step, of rank 1
    Trainer(Net(), _args(folder, stop_on_nan=True), train_dataset=data).train()


def test_every_rank_stops_at_a_nan_and_the_error_names_its_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_meet_a_nan, str(tmp_path), world_size=2)
    errors = failed.value.errors
    assert all(isinstance(errors[rank], NonFiniteError) for rank in (0, 1))
    assert "step 2 is not finite: 'x' in the batch contains 1 nan among 12 values" in str(errors[1])
    # Rank 0 sees the gradient of both.
    assert "step 2 is not finite: " in str(errors[0])


def _shard(folder: str, by_environment: bool) -> list[dict[str, torch.Tensor]]:
    options: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 0, "version": 2}}
    if by_environment:
        os.environ["ACCELERATE_USE_FSDP"], options = "true", {}
    options |= {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    args = _args(folder, save_total_limit=1, **options)
    trainer = Trainer(Net(), args, train_dataset=net_data(16), eval_dataset=net_data(4))
    assert trainer.accelerator.capabilities.shards_parameters
    trainer.train()
    trainer.save_model(f"{folder}/end")
    with pytest.raises(UsageError, match="only this rank's shards"):
        trainer._save(folder)
    with pytest.raises(ConfigError, match="a sharded model cannot be cast"):
        Trainer(Net(), _args(folder, fsdp=True, bf16_full_eval=True), eval_dataset=net_data(4)).evaluate()
    return [load_file(f"{folder}/{name}/model.safetensors") for name in ("end", "checkpoint-4")]


@pytest.mark.parametrize("by_environment", [False, True])
def test_sharded_training_matches_the_plain_loop(tmp_path: Path, by_environment: bool) -> None:
    expected = dict(_plain(16, 4).state_dict())
    for weights in (one for rank in run_on_ranks(_shard, str(tmp_path), by_environment, world_size=2) for one in rank):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)  # float64, another order of additions
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "end"]


def _search(folder: str) -> tuple[Any, list[float]]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rates: list[float] = []

    def init() -> Net:
        rates.append(trainer.args.learning_rate if "trainer" in scope else 0.0)
        return Net()

    scope: dict[str, Any] = {}
    trainer = Trainer(model_init=init, args=_args(folder), train_dataset=net_data(16), eval_dataset=net_data(4))
    scope["trainer"] = trainer

    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_categorical("learning_rate", [0.1, 0.5])}

    sampler = optuna.samplers.GridSampler({"learning_rate": [0.1, 0.5]}, seed=1)
    best = trainer.hyperparameter_search(space, n_trials=2, sampler=sampler)
    assert best is not None
    return tuple(best)[:3], rates[1:]


def test_rank_zero_chooses_the_settings_of_a_search(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (best, rates), (received, same) = run_on_ranks(_search, str(tmp_path), world_size=2)
    assert received == best  # transformers: None beside rank zero, whose next line fails there
    assert rates == same
    assert sorted(rates) == [0.1, 0.5]
    x, labels = stacked(net_data(4))
    losses = {rate: F.cross_entropy(_plain(16, 4, rate)(x)["logits"], labels).item() for rate in (0.1, 0.5)}
    run = BestRun(*best)
    assert run.hyperparameters == {"learning_rate": min(losses, key=losses.__getitem__)}
    assert run.objective == pytest.approx(min(losses.values()), rel=1e-12)


class _Sets(TrainerCallback):
    """Sets a flag in an event at step 2, on some ranks."""

    def __init__(self, flag: str, ranks: list[int]) -> None:
        self.flag, self.ranks = flag, ranks

    def _set(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index in self.ranks:
            setattr(control, self.flag, True)


def _flagged(folder: str, flag: str, event: str, ranks: list[int]) -> tuple[int, list[str]]:
    args = _args(folder, logging_steps=2 if event == "on_log" else 3)
    callback = type("Sets", (_Sets,), {event: lambda self, *given, **more: self._set(*given, **more)})(flag, ranks)
    data = net_data(16)
    trainer = Trainer(Net(), args, train_dataset=data, eval_dataset=data, callbacks=[callback])
    trainer.train()
    folders = [path.name for path in Path(folder).iterdir()] if args.process_index == 0 else []
    return trainer.state.global_step, folders


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
@pytest.mark.parametrize("flag", ["should_save", "should_log", "should_evaluate", "should_training_stop"])
def test_a_callback_that_sets_a_flag_on_one_rank_only_is_named(tmp_path: Path, flag: str, event: str) -> None:
    """The other rank is in the next step, whose collectives this one would never join."""
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_flagged, str(tmp_path), flag, event, [1], world_size=2, init_group=False)
    error = failed.value.errors[1]
    assert isinstance(error, DesyncError)
    assert f"setting control.{flag} = True in {event} must be called on every rank" in str(error)
    assert "not from state.is_world_process_zero" in str(error)


def test_a_callback_that_sets_a_flag_on_all_ranks_is_followed(tmp_path: Path) -> None:
    for steps, _ in run_on_ranks(_flagged, str(tmp_path), "should_training_stop", "on_step_end", [0, 1], world_size=2):
        assert steps == 2
    for steps, folders in run_on_ranks(_flagged, str(tmp_path), "should_save", "on_step_end", [0, 1], world_size=2):
        assert steps == 4
        assert folders in (["checkpoint-2"], [])
