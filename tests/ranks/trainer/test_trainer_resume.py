"""The Trainer on several ranks: bit-identical resume, joint saves, and (parity) the updates of one process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.base.errors import CheckpointError, ConfigError, UsageError
from echelon.trainer import Trainer, TrainerCallback, TrainingArguments, training_run
from echelon.world.group import close_group
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import heard, whole
from tests.reference import warmup_then_linear
from tests.trainer_models import EndsAfter, Net, arguments, net_data, train_rows_plainly

SEED, N, GLOBAL, STEPS = 4, 50, 12, 20  # 5 updates of an epoch, the last one of 2 samples


def _data() -> list[dict[str, torch.Tensor]]:
    # A sample without a label counts nothing in the mean: an update is one over labels, not over samples.
    return net_data(N, unlabelled=(7,))


def _args(folder: str, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 0.05,
        "warmup_steps": 2,
        "optim": "sgd",
        "max_grad_norm": 0.3,
        "logging_steps": 1,
        "seed": SEED,
    }
    return arguments(folder, **{**defaults, **options})


def _train(
    folder: str, *, end: int | None = None, resume: Any = None, dropout: float = 0.0, data: Any = None, **options: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    model = Net(dropout)
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
    args = _args(folder, **options)
    trainer = Trainer(model, args, train_dataset=data or _data(), callbacks=[EndsAfter(end)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*contains RNG states for .* process")
        trainer.train(resume_from_checkpoint=resume)
    logs = [
        {name: entry[name] for name in ("loss", "grad_norm", "learning_rate")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return logs, {name: whole(value) for name, value in trainer.model.state_dict().items()}


def _plain_loop() -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train with whole batches of GLOBAL samples in one process of plain PyTorch."""
    plain = train_rows_plainly(
        Net(),
        _data(),
        batch_size=GLOBAL,
        epochs=4,
        seed=SEED,
        rate=warmup_then_linear(0.05, warmup=2, total=STEPS),
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.3),
    )
    values = zip(plain.losses, plain.norms, plain.rates)
    return [dict(zip(("loss", "grad_norm", "learning_rate"), one)) for one in values], plain.model.state_dict()


def _require_close(found: Any, wanted: Any) -> None:
    """float64: only the order of additions differs."""
    assert len(found[0]) == len(wanted[0]) == STEPS
    for one, other in zip(found[0], wanted[0]):
        assert one == pytest.approx(other, rel=1e-12)
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_exact_updates_match_whole_batches_in_a_plain_loop(tmp_path: Path, world_size: int) -> None:
    options: dict[str, Any] = {"parity": "exact", "global_batch_size": GLOBAL, "max_micro_batch_size": 3}
    wanted = _plain_loop()
    for found in run_on_ranks(_train, str(tmp_path), world_size=world_size, **options):
        _require_close(found, wanted)


def _is_same(found: Any, wanted: Any) -> bool:
    return found[0] == wanted[0] and all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


@pytest.mark.slow
def test_bitwise_training_is_identical_on_any_number_of_ranks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"parity": "bitwise", "global_batch_size": GLOBAL, "canonical_shards": 4, "dropout": 0.2}
    found = [
        run_on_ranks(_train, str(tmp_path), world_size=world_size, **options, optim="adamw_torch")
        for world_size in (1, 2, 3)
    ]
    assert all(_is_same(one, found[0][0]) for each in found for one in each)
    assert len(found[0][0][0]) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("parity", ["exact", "bitwise"])
def test_the_number_of_ranks_may_change_within_an_epoch(tmp_path: Path, parity: str) -> None:
    options: dict[str, Any] = {"parity": parity, "canonical_shards": 4, "per_device_train_batch_size": 6}
    folder = str(tmp_path)
    whole = (
        _plain_loop()
        if parity == "exact"
        else run_on_ranks(_train, folder + "/whole", world_size=1, **options, global_batch_size=GLOBAL)[0]
    )
    # The batch of all is what the first start makes: 6 samples, twice, on one process.
    run_on_ranks(_train, folder, world_size=1, end=3, gradient_accumulation_steps=2, **options)
    run_on_ranks(_train, folder, world_size=2, end=8, resume=True, **options)
    for found in run_on_ranks(_train, folder, world_size=3, resume="auto", **options):
        _require_close(found, whole) if parity == "exact" else None
        assert parity == "exact" or _is_same(found, whole)


@pytest.mark.slow
@pytest.mark.parametrize("parity", ["exact", "bitwise"])
def test_sharded_training_matches_one_process_and_resumes(tmp_path: Path, parity: str) -> None:
    options: dict[str, Any] = {"parity": parity, "global_batch_size": GLOBAL, "canonical_shards": 4}
    folder, sharded = str(tmp_path), {**options, "fsdp": "full_shard"}
    if parity == "bitwise":
        options |= {"dropout": 0.2, "optim": "adamw_torch"}
        sharded |= options
        wanted = run_on_ranks(_train, folder + "/one", world_size=1, **options)[0]
    else:
        wanted = _plain_loop()
    if parity == "bitwise":  # the default rounds by where in memory a number stands
        with pytest.raises(RanksFailed, match="optim='adamw_torch'"):
            run_on_ranks(_train, folder, **{**sharded, "optim": "adamw_torch_fused"})
    run_on_ranks(_train, folder, end=8, **sharded)  # within the second epoch
    whole = run_on_ranks(_train, folder + "/whole", **sharded)
    again = run_on_ranks(_train, folder, resume=True, **sharded)
    for found, uninterrupted in zip(again, whole):
        assert _is_same(found, uninterrupted)
        _require_close(found, wanted) if parity == "exact" else None
        assert parity == "exact" or _is_same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "blocking"), [("", True), ("full_shard", True), ("", False), ("full_shard", False)])
@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_two_ranks_resume_bit_for_bit(tmp_path: Path, layout: str, fsdp: str, blocking: bool) -> None:
    options: dict[str, Any] = {"dropout": 0.3, "gradient_accumulation_steps": 2, "optim": "adamw_torch", "max_steps": 8}
    options |= {"checkpoint_format": layout, "fsdp": fsdp}
    whole = run_on_ranks(_train, str(tmp_path / "whole"), **options)
    assert whole[0][0] == whole[1][0]
    run_on_ranks(
        _train, str(tmp_path), end=5, save_blocking=blocking, **options
    )  # 7 batches of each rank in an epoch: 4 updates
    again = run_on_ranks(_train, str(tmp_path), resume=True, **options)
    for found, wanted in zip(again, whole):
        assert _is_same(found, wanted)
    names = {path.name for path in (tmp_path / "checkpoint-5").iterdir()}
    assert ({"rng_state_0.pth", "rng_state_1.pth"} <= names) is (layout == "transformers")

    # Another number of processes cannot enter the middle of an epoch; from its beginning it can.
    options["fsdp"] = ""
    with pytest.raises(RanksFailed, match="samples would be repeated or skipped") as error:
        run_on_ranks(_train, str(tmp_path), resume=True, world_size=1, **options)
    assert isinstance(error.value.errors[0], CheckpointError)
    logs, _ = run_on_ranks(_train, str(tmp_path), resume=True, world_size=1, ignore_data_skip=True, **options)[0]
    assert len(logs) == 8


def _fails(folder: str, ranks: list[int]) -> str:
    class Breaks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and args.process_index in ranks:
                raise RuntimeError(f"broken on {args.process_index}")

    args = _args(folder, save_on_exception=True, max_steps=5)
    trainer = Trainer(Net(), args, train_dataset=_data(), callbacks=[Breaks])
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_error_on_all_ranks_saves_a_checkpoint(tmp_path: Path) -> None:
    assert run_on_ranks(_fails, str(tmp_path), [0, 1]) == ["broken on 0", "broken on 1"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def _fails_alone(folder: str) -> None:
    with heard("echelon.trainer.training_run") as messages, pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "_TIMEOUT", timedelta(seconds=0.5))
        told = _fails(folder, [0])
    raise AssertionError(f"{told}; {messages}")


def test_an_error_on_one_rank_saves_nothing_and_logs_why(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as error:
        run_on_ranks(_fails_alone, str(tmp_path))
    text = str(error.value.errors[0])
    assert "broken on 0; [" in text
    assert "cannot save a checkpoint of step 3: the other ranks did not fail with the same error in this step" in text
    assert list(tmp_path.iterdir()) == []


def _is_told_to_end(folder: str) -> tuple[Any, int]:
    class Told(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)  # the ranks tell each other by a thread that looks four times a second

    args = _args(folder, save_on_signal=True, max_steps=500)
    trainer = Trainer(Net(), args, train_dataset=_data(), callbacks=[Told])
    try:
        trainer.train()
    except SystemExit as stop:
        return stop.code, trainer.state.global_step
    finally:
        close_group()
    return None, trainer.state.global_step


def test_a_signal_to_one_rank_saves_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    first, second = run_on_ranks(_is_told_to_end, str(tmp_path), init_group=False)
    assert first == second
    assert first[0] == 143
    step = first[1]
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{step}"]
    for logs, _ in run_on_ranks(_train, str(tmp_path), resume="auto", max_steps=step + 2):
        assert len(logs) == step + 2


def _refused(folder: str, **options: Any) -> str:
    with pytest.raises((CheckpointError, ConfigError, UsageError)) as error:
        _train(folder, **options)
    return str(error.value)


def test_checkpoints_that_exact_training_cannot_resume_are_rejected(tmp_path: Path) -> None:
    folder, exact = str(tmp_path), {"parity": "exact", "max_steps": 4}
    _train(folder, end=2, **exact, global_batch_size=GLOBAL)
    assert "set global_batch_size=12" in _refused(folder, resume=True, **exact, global_batch_size=8)
    assert "saved with parity='exact'" in _refused(folder, resume=True, max_steps=4)
    assert "set max_micro_batch_size" in _refused(folder, **exact, auto_find_batch_size=True)
    other = str(tmp_path / "other")
    _train(other, end=2, max_steps=4, checkpoint_format="transformers")
    assert "which lacks the state that parity='exact' needs" in _refused(other, resume=True, **exact)
    shards = {"parity": "bitwise", "max_steps": 4, "global_batch_size": GLOBAL}
    _train(folder + "/b", end=2, **shards, canonical_shards=4)
    assert "set canonical_shards=4" in _refused(folder + "/b", resume=True, **shards, canonical_shards=6)
