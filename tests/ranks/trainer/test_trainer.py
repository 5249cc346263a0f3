"""The Trainer on two ranks: the same training as one process with the large batch, and exact evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from echelon.base.errors import DesyncError, UsageError
from echelon.trainer import EvalPrediction, Trainer, TrainerCallback
from tests.harness import RanksFailed, errors_on_ranks, run_on_ranks
from tests.reference import warmup_then_linear
from tests.trainer_models import CONSTANT_SGD, Net, arguments, logged, net_data, stacked, train_rows_plainly

SEED = 4


def _train(folder: str, accumulation: int, optim: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], float]:
    args = arguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation, num_train_epochs=2, learning_rate=0.05,
        warmup_steps=2, optim=optim, max_grad_norm=0.2, logging_steps=2, save_strategy="steps", save_steps=3, seed=SEED,
    )  # fmt: skip
    trainer = Trainer(Net(), args, train_dataset=net_data(48))
    result = trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logs, {k: v.clone() for k, v in trainer.model.state_dict().items()}, result.training_loss


@pytest.mark.parametrize(
    ("accumulation", "optim"),
    [
        (1, "sgd"),
        (4, "adamw_torch"),
        pytest.param(1, "adamw_torch", marks=pytest.mark.soak),
        pytest.param(4, "sgd", marks=pytest.mark.soak),
    ],
)
def test_two_ranks_train_like_one_process_with_both_batches(tmp_path: Any, accumulation: int, optim: str) -> None:
    # float64; only the order of additions differs. AdamW turns the noise of a zero gradient into a step: 1e-9.
    tolerance = 1e-12 if optim == "sgd" else 1e-9
    model = Net()
    kind: Any = {"sgd": torch.optim.SGD, "adamw_torch": torch.optim.AdamW}[optim]
    size = 4 * 2 * accumulation  # each micro-batch of a rank weighs the same, also in the short last update
    plain = train_rows_plainly(
        model,
        net_data(48),
        batch_size=size,
        epochs=2,
        seed=SEED,
        optimizer=kind(model.parameters(), weight_decay=0.0),
        rate=warmup_then_linear(0.05, warmup=2, total=2 * -(-48 // size)),
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.2),
    )
    losses = torch.tensor(plain.losses, dtype=torch.float64)
    for logs, weights, training_loss in run_on_ranks(_train, str(tmp_path), accumulation, optim, world_size=2):
        for name, expected in (
            ("loss", losses.view(-1, 2).mean(1).tolist()),
            ("grad_norm", plain.norms[1::2]),
            ("learning_rate", plain.rates[1::2]),
        ):
            assert [entry[name] for entry in logs] == pytest.approx(expected, rel=tolerance), name
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance * 1e-2)
        assert training_loss == pytest.approx(losses.mean().item(), rel=tolerance)
    steps = 12 if accumulation == 1 else 4
    expected_folders = {f"checkpoint-{step}" for step in {*range(3, steps + 1, 3), steps}}
    assert {path.name for path in tmp_path.iterdir()} == expected_folders


def _metrics(result: EvalPrediction) -> dict[str, float]:
    right = result.predictions.argmax(axis=1) == result.label_ids
    return {"accuracy": float(right.mean()), "count": len(result.label_ids), "sum": float(result.predictions.sum())}


def _evaluate(folder: str, n: int, batch_size: int) -> tuple[dict[str, float], Any, Any]:
    args = arguments(folder, per_device_eval_batch_size=batch_size)
    trainer = Trainer(Net(), args, eval_dataset=net_data(n), compute_metrics=_metrics)
    metrics = trainer.evaluate()
    output = trainer.predict(net_data(n))
    return metrics, output.predictions, output.label_ids


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("n", "batch_size"), [(1, 4), (3, 4), (4, 4), (5, 4), (7, 2), (9, 4), (13, 4), (16, 4), (17, 4)]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_evaluation_counts_each_sample_once(tmp_path: Any, n: int, batch_size: int, world_size: int) -> None:
    x, labels = stacked(net_data(n))
    logits = Net()(x)["logits"].detach()
    for metrics, predictions, label_ids in run_on_ranks(_evaluate, str(tmp_path), n, batch_size, world_size=world_size):
        # float64; matrix products of other batch sizes differ in the last bits.
        torch.testing.assert_close(torch.from_numpy(predictions), logits, rtol=1e-13, atol=1e-14)
        assert label_ids.tolist() == labels.tolist()
        assert metrics["eval_count"] == n
        assert metrics["eval_accuracy"] == (logits.argmax(dim=1) == labels).double().mean().item()
        assert metrics["eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-13)


def _evaluate_pairs(folder: str, n: int, batch_size: int, **options: Any) -> float:
    """Evaluate with a collator that makes two rows of each sample, as trl's for preferences does."""

    def pairs(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.cat([torch.stack([row[name] for row in rows])] * 2) for name in rows[0]}

    args = arguments(folder, per_device_eval_batch_size=batch_size, **options)
    return Trainer(Net(), args, data_collator=pairs, eval_dataset=net_data(n)).evaluate()["eval_loss"]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("n", "batch_size", "options"),
    [
        *((n, size, {}) for n, size in ((1, 4), (5, 4), (7, 2), (12, 4), (12, 8), (13, 6), (14, 4), (17, 4))),
        (13, 6, {"accelerator_config": {"split_batches": True}}),
        (13, 6, {"parity": "exact"}),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_evaluation_counts_each_sample_with_two_rows_once(
    tmp_path: Any, n: int, batch_size: int, options: dict[str, Any], world_size: int
) -> None:
    x, labels = stacked(net_data(n))
    expected = F.cross_entropy(Net()(x)["logits"], labels).item()
    for loss in run_on_ranks(_evaluate_pairs, str(tmp_path), n, batch_size, world_size=world_size, **options):
        assert loss == pytest.approx(expected, rel=1e-13)  # float64


def _print_logs(folder: str) -> tuple[list[bool], int]:
    on_rank_zero: list[bool] = []

    class Recorder(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            on_rank_zero.append(state.is_world_process_zero)

    args = arguments(folder, max_steps=1, logging_steps=1, disable_tqdm=False)
    trainer = Trainer(Net(), args, train_dataset=net_data(8), callbacks=[Recorder()])
    trainer.train()
    trainer.log_metrics("train", {"train_loss": 1.0})
    return on_rank_zero, args.world_size


def test_only_rank_zero_prints(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on_ranks(_print_logs, str(tmp_path), world_size=2) == [([True] * 2, 2), ([False] * 2, 2)]
    lines = [line for line in capfd.readouterr().out.splitlines() if "loss" in line or "*****" in line]
    assert len(lines) == 4  # the step, the summary, and the two of the table
    assert all(line.startswith("[rank 0] ") for line in lines)


def _tokens(folder: str) -> float:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            used = labels != -100
            error = ((self.weight * x - labels) ** 2)[used].sum()
            return {"loss": error / (num_items_in_batch if num_items_in_batch is not None else used.sum())}

    x = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(4, 4)
    labels = torch.full((4, 4), -100.0, dtype=torch.float64)
    for row, count in enumerate((1, 4, 2, 3)):
        labels[row, :count] = 1.0
    options = {**CONSTANT_SGD, "per_device_train_batch_size": 1, "logging_steps": 1, "learning_rate": 0.001}
    args = arguments(folder, gradient_accumulation_steps=4 // dist.get_world_size(), **options)
    model = Counts()
    trainer = Trainer(model, args, train_dataset=[{"x": x[i], "labels": labels[i]} for i in range(4)])
    trainer.train()
    used = labels != -100
    wanted = 2.0 - 0.001 * (2 * x * (2.0 * x - labels))[used].sum() / 10
    loss = ((2.0 * x - labels) ** 2)[used].sum() / 10
    logged = trainer.state.log_history[0]["loss"]
    assert logged == pytest.approx(loss.item(), rel=1e-13), (logged, loss)
    return abs(model.weight.item() - wanted.item())


@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_of_all_ranks_and_batches_weigh_equally(tmp_path: Any, world_size: int) -> None:
    # 1, 4, 2 and 3 tokens in the four batches of one update: the mean is over all 10, not the mean of four means.
    assert max(run_on_ranks(_tokens, str(tmp_path), world_size=world_size)) < 1e-14


def _train_without_data(folder: str) -> None:
    Trainer(Net(), arguments(folder), train_dataset=None).train()


def test_an_error_names_the_rank(tmp_path: Any) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_train_without_data, str(tmp_path), world_size=2)
    error = failed.value.errors[1]
    assert isinstance(error, UsageError)
    assert error.where == "rank 1, Trainer(train_dataset=)"


class _StopsEachEpoch(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = True


def _uneven(folder: str, num_samples: int) -> tuple[list[float], list[torch.Tensor]]:
    args = arguments(
        folder, per_device_train_batch_size=4, num_train_epochs=2, learning_rate=0.1, lr_scheduler_type="linear", optim="sgd",
        accelerator_config={"even_batches": False}, logging_steps=1, seed=SEED,
    )  # fmt: skip
    trainer = Trainer(Net(), args, train_dataset=net_data(num_samples), callbacks=[_StopsEachEpoch()])
    trainer.train()
    return logged(trainer, "learning_rate"), [p.detach() for p in trainer.model.parameters()]


def test_ranks_with_different_numbers_of_batches_share_one_schedule(tmp_path: Any) -> None:
    """Three batches for two ranks: the rank with one batch must not plan half as many steps."""
    (rates, weights), (other_rates, other_weights) = run_on_ranks(_uneven, str(tmp_path), 12)
    # Two epochs of two steps are planned, and each ends after its first step: steps 0 and 1 of 4.
    assert rates == other_rates == pytest.approx([0.1, 0.1 * (1 - 1 / 4)])
    assert all(torch.equal(*both) for both in zip(weights, other_weights))  # the same gradients on both


def test_a_rank_without_a_batch_is_named_on_all_ranks(tmp_path: Any) -> None:
    for text in errors_on_ranks(DesyncError, _uneven, str(tmp_path), 3, timeout=20, num_errors=2):
        assert "rank 1 has no batch to train on, but rank 0 has 1" in text
