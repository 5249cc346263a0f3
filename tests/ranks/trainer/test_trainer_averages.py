"""The Trainer's averages of the weights (``ema_decay``, ``swa_start``): evaluations, model files, the trained model, and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from echelon.base.errors import ConfigError
from echelon.trainer import Trainer, TrainingArguments
from echelon.trainer.checkpoint.checkpoint_folders import ARGUMENTS_FILE
from tests.harness import run_on_ranks
from tests.parallel_models import VOCABULARY, loss_without_float32, tiny_llama
from tests.prepared_loop import whole
from tests.reference import permutation, saved_weights
from tests.trainer_models import CONSTANT_SGD, EndsAfter, Net, arguments, net_data, stacked, warnings_of

_ROWS, _EVALUATED, _BATCH, _STEPS = 24, 7, 4, 6
_SETTINGS: list[tuple[dict[str, Any], int]] = [({"ema_decay": 0.7}, 1), ({"swa_start": 2, "average_every": 2}, 2)]


def _args(folder: str, **options: Any) -> TrainingArguments:
    settings = {
        **CONSTANT_SGD,
        "parity": "exact",
        "global_batch_size": _BATCH,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    return arguments(folder, **{**settings, **options})


def _train(folder: str, engine: str, until: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Train to step ``until``, which saves; from the newest checkpoint, if there is one."""
    trainer = Trainer(
        Net(),
        _args(folder, engine=engine, **settings),
        train_dataset=net_data(_ROWS),
        eval_dataset=net_data(_EVALUATED),
        callbacks=[EndsAfter(until)],
    )
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(f"{folder}/trained")
    after = trainer.evaluate()["eval_loss"]
    return {
        "losses": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "after": after,
        "weights": [whole(p) for p in trainer.model.parameters()],
    }


def _formula(settings: dict[str, Any], every: int) -> list[list[torch.Tensor]]:
    """Return the averages after each step of a plain loop (the weights before the first update)."""
    model, rows = Net(), net_data(_ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = permutation(_ROWS, seed=42, epoch=0)
    history = [[p.detach().clone() for p in model.parameters()]]
    averages = []
    for step in range(_STEPS):
        x, labels = stacked([rows[i] for i in order[_BATCH * step : _BATCH * (step + 1)]])
        F.cross_entropy(model(x)["logits"], labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append([p.detach().clone() for p in model.parameters()])
        if "ema_decay" in settings:
            average = history[0]
            for weights in history[every::every]:
                average = [0.7 * a + 0.3 * w for a, w in zip(average, weights)]
        else:
            taken = history[settings["swa_start"] :: every]
            average = [sum(ws) / len(taken) for ws in zip(*taken)] if taken else history[-1]
        averages.append(average)
    return averages


def _loss_of(weights: list[torch.Tensor]) -> float:
    model = Net()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights):
            parameter.copy_(value)
        x, labels = stacked(net_data(_EVALUATED))
        return F.cross_entropy(model(x)["logits"], labels).item()


@pytest.mark.parametrize(("settings", "every"), _SETTINGS, ids=["ema", "swa"])
@pytest.mark.slow
@pytest.mark.parametrize("layouts", [[("ddp", 3), ("fsdp2", 2)], [("zero1", 3), ("single", 1)]], ids=str)
def test_evaluations_files_and_the_trained_model_have_the_averages_of_the_formula(
    layouts: list[tuple[str, int]], settings: dict[str, Any], every: int, tmp_path: Path
) -> None:
    averages = _formula(settings, every)
    for (engine, world_size), until in zip(layouts, (3, None)):
        for found in run_on_ranks(_train, str(tmp_path), engine, until, settings, world_size=world_size):
            last = averages[(until or _STEPS) - 1]
            expected = [_loss_of(averages[step]) for step in (1, 3, 5)][: 1 if until else 3]
            assert found["losses"] == pytest.approx([*expected, _loss_of(last)], rel=1e-12, abs=0), engine
            assert found["after"] == pytest.approx(_loss_of(last), rel=1e-12, abs=0)
            for value, reference in zip(found["weights"], last):
                torch.testing.assert_close(value, reference, rtol=0, atol=1e-12)
    names = [name for name, _ in Net().named_parameters()]
    for folder, step in (("checkpoint-2", 2), ("checkpoint-3", 3), ("checkpoint-6", 6), ("trained", 6)):
        saved = load_file(tmp_path / folder / "model.safetensors")
        for name, reference in zip(names, averages[step - 1]):
            torch.testing.assert_close(saved[name], reference, rtol=0, atol=1e-12)


def test_the_best_checkpoint_has_the_weights_that_were_evaluated(tmp_path: Path) -> None:
    """Only the last evaluation is worse than the others, so the averaged weights of step 4 come back."""
    calls: list[int] = []

    def metrics(_: Any) -> dict[str, float]:
        calls.append(len(calls))
        return {"score": [1.0, 2.0, 0.0, 0.0][calls[-1]]}

    options = {"load_best_model_at_end": True, "metric_for_best_model": "score", "save_total_limit": 1}
    trainer = Trainer(
        Net(),
        _args(str(tmp_path), ema_decay=0.7, **options),
        train_dataset=net_data(_ROWS),
        eval_dataset=net_data(_EVALUATED),
        compute_metrics=metrics,
    )
    trainer.train()
    expected = _formula({"ema_decay": 0.7}, 1)[3]
    for parameter, reference in zip(trainer.model.parameters(), expected):
        torch.testing.assert_close(parameter.detach(), reference, rtol=0, atol=1e-12)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(_loss_of(expected), rel=1e-12, abs=0)


def test_a_second_training_starts_a_new_average_with_the_averaged_weights(tmp_path: Path) -> None:
    trainer = Trainer(Net(), _args(str(tmp_path), ema_decay=1.0, eval_strategy="no"), train_dataset=net_data(_ROWS))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    for _ in range(2):
        trainer.train()
        assert all(torch.equal(p, value) for p, value in zip(trainer.model.parameters(), before))
        assert not trainer.accelerator.session.objects.averages


def test_a_run_may_begin_and_end_to_average_when_it_is_resumed(tmp_path: Path) -> None:
    def train(folder: str, until: int | None, **settings: Any) -> None:
        Trainer(
            Net(),
            _args(folder, eval_strategy="no", **settings),
            train_dataset=net_data(_ROWS),
            callbacks=[EndsAfter(until)],
        ).train(resume_from_checkpoint="auto")

    train(str(tmp_path / "begins"), 3)
    texts = warnings_of(lambda: train(str(tmp_path / "begins"), None, ema_decay=0.7))
    assert any("has no averages of the weights, so the EMA(decay=0.7" in text for text in texts), texts
    train(str(tmp_path / "ends"), 3, ema_decay=0.7)
    texts = warnings_of(lambda: train(str(tmp_path / "ends"), None))
    assert any("holds averages of the weights (EMA), which this run does not continue" in text for text in texts), texts
    # The last checkpoint of the run without an average has the weights of training in its files.
    saved = load_file(tmp_path / "ends" / "checkpoint-6" / "model.safetensors")
    plain = _formula({"swa_start": 7}, 1)[-1]
    for value, reference in zip(saved.values(), [plain[i] for i in _order(saved)]):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-12)
    assert json.loads((tmp_path / "begins" / "checkpoint-6" / ARGUMENTS_FILE).read_text())["ema_decay"] == 0.7


def _order(saved: dict[str, torch.Tensor]) -> list[int]:
    names = [name for name, _ in Net().named_parameters()]
    return [names.index(name) for name in saved]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ema_decay": 0.9, "swa_start": 2}, "ema_decay and swa_start both define"),
        ({"average_every": 2}, "average_every=2 has no effect"),
        ({"ema_decay": 0.9, "checkpoint_format": "transformers"}, "cannot hold the average"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        arguments(tmp_path, **settings)


# ---- adapters and pipelines --------------------------------------------------------------------------------------------


def _adapted() -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["layers.0"], init_lora_weights=False)
    model = Net()
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def _train_adapter(folder: str, engine: str, until: int | None) -> dict[str, torch.Tensor]:
    options: dict[str, Any] = {"ema_decay": 0.7, "eval_strategy": "no", "engine": engine}
    if until is None:  # the last checkpoint is the best one
        options |= {"eval_strategy": "steps", "load_best_model_at_end": True}
    trainer = Trainer(
        _adapted(),
        _args(folder, **options),
        train_dataset=net_data(_ROWS),
        eval_dataset=net_data(_EVALUATED),
        callbacks=[EndsAfter(until)],
    )
    trainer.train(resume_from_checkpoint="auto")
    return {name: whole(p) for name, p in trainer.model.named_parameters() if p.requires_grad}


def _averages_of_adapters() -> list[dict[str, torch.Tensor]]:
    model, rows = _adapted(), net_data(_ROWS)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    order = permutation(_ROWS, seed=42, epoch=0)
    average, found = {name: p.detach().clone() for name, p in trained.items()}, []
    for step in range(_STEPS):
        x, labels = stacked([rows[i] for i in order[_BATCH * step : _BATCH * (step + 1)]])
        model(x, labels)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        average = {name: 0.7 * average[name] + 0.3 * p.detach() for name, p in trained.items()}
        found.append(average)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_adapters_are_averaged_and_a_resumed_run_continues_from_their_weights_of_training(
    engine: str, tmp_path: Path
) -> None:
    averages = _averages_of_adapters()
    for until in (3, None):
        for found in run_on_ranks(_train_adapter, str(tmp_path), engine, until, world_size=2):
            expected = averages[(until or _STEPS) - 1]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    saved = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    for name, value in averages[2].items():
        torch.testing.assert_close(saved[name.replace(".default", "")], value, rtol=0, atol=1e-12)


def _train_pipeline(folder: str, until: int | None) -> float:
    """Train as above, and return the loss of an evaluation after training, with the head of the last stage."""
    trainer = Trainer(
        _language_model(),
        _args(
            folder,
            ema_decay=0.7,
            parallelism_config={"pp_size": 2},
            pipeline_num_micro_batches=2,
            load_best_model_at_end=until is None,
        ),
        train_dataset=_tokens(),
        eval_dataset=_tokens()[:_BATCH],
        callbacks=[EndsAfter(until)],
    )
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(f"{folder}/trained")
    return trainer.evaluate()["eval_loss"]


def _language_model() -> Any:
    model: Any = tiny_llama(tied=True)
    model.loss_function = loss_without_float32
    return model


def _tokens() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (_ROWS, 8), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


@pytest.mark.slow
def test_stages_with_a_shared_weight_are_averaged_and_the_best_ones_come_back(tmp_path: Path) -> None:
    model, data, order = _language_model(), _tokens(), permutation(_ROWS, seed=42, epoch=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(_STEPS):
        rows = [data[i] for i in order[_BATCH * step : _BATCH * (step + 1)]]
        model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = {name: 0.7 * average[name] + 0.3 * p.detach() for name, p in model.named_parameters()}
    for until in (3, None):
        losses = run_on_ranks(_train_pipeline, str(tmp_path), until, world_size=2, timeout=120)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
        loss = model(**{name: torch.stack([row[name] for row in data[:_BATCH]]) for name in data[0]}).loss.item()
    assert losses == pytest.approx([loss] * 2, rel=1e-12, abs=0)
    for folder in ("checkpoint-6", "trained"):
        saved = saved_weights(tmp_path / folder)
        for name, value in average.items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
