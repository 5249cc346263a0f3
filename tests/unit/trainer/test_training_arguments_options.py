"""What single settings of TrainingArguments do, each beside a formula or a plain loop."""

from __future__ import annotations

import csv
import math
import sys
from mmap import mmap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from echelon.base.errors import ConfigError, MissingExtraError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.trainer import (
    EvalPrediction,
    NonFiniteError,
    NotebookProgressCallback,
    Trainer,
    get_last_checkpoint,
)
from echelon.trainer.data.length_samplers import LengthGroupedSampler
from echelon.trainer.features.auto_find_batch_size import smaller_batch_sizes
from tests.trainer_models import CONSTANT_SGD, DATA, Line, arguments as _args, warnings_of


class Words(nn.Module):
    """A model of the next word with 5 words, as large as it needs to be."""

    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embeddings = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.checkpointed: Any = None

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.checkpointed = gradient_checkpointing_kwargs or {"use_reentrant": False}

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        vectors = self.embeddings(input_ids)
        if self.checkpointed is None:
            logits = self.head(vectors)
        else:
            logits = checkpoint(self.head, vectors, **self.checkpointed)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


TEXTS = [
    {"input_ids": torch.tensor(ids), "labels": torch.tensor([-100, *ids[1:]])}
    for ids in ([0, 1, 2, 3], [1, 2, 3, 4], [4, 3, 2, 1], [2, 2, 0, 0])
]


def _weights(trainer: Trainer) -> list[torch.Tensor]:
    return [value.clone() for value in trainer.model.state_dict().values()]


def _equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# ---- the loss --------------------------------------------------------------------------------------------------------


def _smoothed(logits: torch.Tensor, labels: torch.Tensor, part: float) -> torch.Tensor:
    """The formula: (1 - part) * -log p(label) + part * the mean over classes of -log p, over the labels that count."""
    total, count = torch.zeros(()), 0
    for row, label in zip(logits.log_softmax(-1).flatten(0, -2), labels.flatten()):
        if label != -100:
            total = total - (1 - part) * row[label] - part * row.mean()
            count += 1
    return total / count


def test_smoothed_labels_follow_the_formula_for_the_next_word_and_for_classes(tmp_path: Path) -> None:
    args = _args(tmp_path, label_smoothing_factor=0.2, per_device_eval_batch_size=4)
    model = Words()
    ids, labels = (torch.stack([text[name] for text in TEXTS]) for name in ("input_ids", "labels"))
    expected = _smoothed(model(ids)["logits"][:, :-1], labels[:, 1:], 0.2).item()
    assert Trainer(model, args, eval_dataset=TEXTS).evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    model.loss_type = "ForTokenClassification"
    expected = _smoothed(model(ids)["logits"], labels, 0.2).item()
    assert Trainer(model, args, eval_dataset=TEXTS).evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_training_with_smoothed_labels_equals_a_plain_loop(tmp_path: Path) -> None:
    args = _args(
        tmp_path,
        label_smoothing_factor=0.1,
        train_sampling_strategy="sequential",
        **CONSTANT_SGD | {"learning_rate": 0.5},
    )
    trainer = Trainer(Words(), args, train_dataset=TEXTS)
    trainer.train()
    plain = Words()
    for batch in (TEXTS[:2], TEXTS[2:]):
        ids, labels = (torch.stack([text[name] for text in batch]) for name in ("input_ids", "labels"))
        gradients = torch.autograd.grad(_smoothed(plain(ids)["logits"][:, :-1], labels[:, 1:], 0.1), plain.parameters())
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients):
                parameter -= 0.5 * gradient
    for ours, theirs in zip(trainer.model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # float32, another order of additions


class _Unlabelled(Line):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(x).squeeze(-1)


@pytest.mark.parametrize("kind", ["tensors", "arrays", "parts of a batch"])
def test_plain_tensors_are_data(tmp_path: Path, kind: str) -> None:
    x, y = torch.arange(10.0)[:, None], 2 * torch.arange(10.0)
    options = {**CONSTANT_SGD, "learning_rate": 0.01, "eval_strategy": "epoch"}
    args = _args(tmp_path, per_device_train_batch_size=10, **options)
    data: Any = (x, y) if kind != "arrays" else (x.numpy(), y.numpy())
    # Of the parts of a batch, forward takes both, and returns the loss.
    source: Any = (Line(), None) if kind == "parts of a batch" else (_Unlabelled(), nn.MSELoss())
    trainer = Trainer(source[0], args, train_dataset=data, eval_dataset=data, compute_loss_func=source[1])
    trainer.train()
    assert trainer.model.layer.weight.item() == pytest.approx(0.04 * 28.5, rel=1e-6)
    output = trainer.predict(data)
    assert output.predictions.shape == (10,)
    assert output.label_ids.tolist() == y.tolist()
    with pytest.raises(UsageError, match="different lengths: 10, 9"):
        Trainer(Line(), args, train_dataset=(x, y[:9]), eval_dataset=data)


def test_parts_of_a_batch_without_a_loss_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="returned no loss; the batch is a list") as error:
        Trainer(_Unlabelled(), _args(tmp_path), train_dataset=(torch.ones(4, 1), torch.ones(4))).train()
    assert "pass compute_loss_func" in (error.value.do or "")


# ---- noise, memory, precision ----------------------------------------------------------------------------------------


def test_neftune_adds_the_noise_of_the_formula_in_training_only(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Looks(Words):
        def __init__(self) -> None:
            super().__init__()
            self.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))

    model = Looks()
    before = model.embeddings.weight.detach().clone()
    args = _args(tmp_path, neftune_noise_alpha=6.0, max_steps=1, eval_strategy="steps", eval_steps=1, learning_rate=0.0)
    trainer = Trainer(model, args, train_dataset=TEXTS[:2], eval_dataset=TEXTS[:2], optimizers=_sgd_at_rest(model))
    assert trainer.neftune_noise_alpha == 6.0
    states: list[torch.Tensor] = []
    model.embeddings.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    trainer.train()
    noisy, clean = seen
    order = torch.randperm(2, generator=torch.Generator().manual_seed(42)).tolist()
    ids = torch.stack([TEXTS[i]["input_ids"] for i in order])
    noise, most = noisy - before[ids], 6.0 / math.sqrt(4 * 4)
    torch.set_rng_state(states[0])
    torch.testing.assert_close(noise, torch.empty(2, 4, 4).uniform_(-most, most), rtol=1e-5, atol=1e-6)
    assert torch.equal(clean, before[torch.stack([text["input_ids"] for text in TEXTS[:2]])])
    assert not model.embeddings._forward_hooks
    with pytest.raises(UsageError, match="Line has no method get_input_embeddings"):
        Trainer(Line(), _args(tmp_path, neftune_noise_alpha=1.0), train_dataset=DATA).train()


def _sgd_at_rest(model: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.SGD(model.parameters(), lr=0.0), None


def test_activations_are_computed_again_with_the_same_result(tmp_path: Path) -> None:
    plain = Trainer(Words(), _args(tmp_path), train_dataset=TEXTS)
    plain.train()
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        args = _args(tmp_path, **{name: True, f"{name}_kwargs": {"use_reentrant": False, "preserve_rng_state": True}})
        trainer = Trainer(Words(), args, train_dataset=TEXTS)
        trainer.train()
        assert trainer.model.checkpointed == {"use_reentrant": False, "preserve_rng_state": True}
        assert _equal(_weights(trainer), _weights(plain))

    class New(Words):
        def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **more: Any) -> None:
            self.checkpointed, self.more = activation_checkpointing_kwargs or {"use_reentrant": False}, more

    args = _args(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    model = New()
    Trainer(model, args, train_dataset=TEXTS).train()
    assert (model.checkpointed, model.more) == ({"use_reentrant": False}, {"every_n_layers": 2})
    with pytest.raises(UsageError, match="Words does not support it with every_n_layers"):
        Trainer(Words(), args, train_dataset=TEXTS).train()


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_blocks_are_recomputed_as_the_accelerator_does(tmp_path: Path, mode: str) -> None:
    plain = Trainer(Words(), _args(tmp_path), train_dataset=TEXTS)
    plain.train()
    calls: list[int] = []
    args: Any = _args(tmp_path, gradient_checkpointing=mode, activation_checkpointing_blocks="Linear")
    trainer = Trainer(Words(), args, train_dataset=TEXTS)
    for module in trainer.model.modules():
        if type(module).__name__ == "Linear":
            forward = module.forward
            module.forward = lambda *given, forward=forward: calls.append(1) or forward(*given)
    trainer.train()
    assert trainer.accelerator.config.value.activation_checkpointing == mode
    assert len(calls) % 2 == 0  # once forward, once backward
    assert calls
    assert _equal(_weights(trainer), _weights(plain))


def test_the_whole_model_is_cast_for_an_evaluation_and_comes_back(tmp_path: Path) -> None:
    seen = []

    class Looks(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            seen.append((self.layer.weight.dtype, x.dtype))
            return super().forward(x, labels)

    model = Looks()
    model.layer.weight.data.fill_(1.0 + 2**-12)  # which bfloat16 rounds to 1
    args = _args(tmp_path, bf16_full_eval=True, max_steps=1, eval_strategy="steps", eval_steps=1, learning_rate=0.0)
    trainer = Trainer(model, args, train_dataset=DATA, eval_dataset=DATA, optimizers=_sgd_at_rest(model))
    trainer.evaluate()
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert model.layer.weight.item() == 1.0 + 2**-12
    seen.clear()
    trainer.train()
    assert set(seen) == {(torch.float32, torch.float32)}  # also the evaluation inside
    seen.clear()
    Trainer(model, _args(tmp_path, fp16_full_eval=True)).predict(DATA)
    assert set(seen) == {(torch.float16, torch.float16)}


def test_tf32_says_what_the_device_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tf32=True needs an NVIDIA Ampere GPU"):
        Trainer(Line(), _args(tmp_path, tf32=True))
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        Trainer(Line(), _args(tmp_path, tf32=False))
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_a_compiled_model_trains_as_the_plain_one_and_saves_its_own_names(tmp_path: Path) -> None:
    plain = Trainer(Line(), _args(tmp_path), train_dataset=DATA)
    plain.train()
    trainer = Trainer(Line(), _args(tmp_path, torch_compile_backend="eager"), train_dataset=DATA)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert type(trainer.model) is Line
    assert _equal(_weights(trainer), _weights(plain))


def test_memory_metrics_are_there_when_asked_for(tmp_path: Path) -> None:
    class Hungry(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            # pages of its own: malloc may still have 48 MiB that an earlier test has freed
            self.kept = torch.frombuffer(mmap(-1, 48 * 2**20), dtype=torch.uint8).fill_(1)
            return super().forward(x, labels)

    trainer = Trainer(Hungry(), _args(tmp_path, skip_memory_metrics=False), train_dataset=DATA, eval_dataset=DATA)
    metrics = trainer.train().metrics
    assert metrics["train_mem_cpu_alloc_delta"] > 30 * 2**20
    assert {"init_mem_cpu_alloc_delta", "init_mem_cpu_peaked_delta", "before_init_mem_cpu"} <= metrics.keys()
    assert metrics["train_mem_cpu_peaked_delta"] >= 0
    found = trainer.evaluate()
    assert {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"} <= found.keys()
    assert not any(name.startswith(("init", "train")) for name in found)
    assert not any("mem" in name for name in Trainer(Line(), _args(tmp_path), eval_dataset=DATA).evaluate())


def test_the_cache_is_emptied_every_so_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = []
    trainer = Trainer(Line(), _args(tmp_path, torch_empty_cache_steps=2), train_dataset=DATA)
    monkeypatch.setattr(
        "echelon.trainer.training_run.clear_device_cache", lambda: emptied.append(trainer.state.global_step)
    )
    trainer.train()
    assert emptied == [0, 2, 4]


def test_liger_kernels_are_put_into_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    module: Any = ModuleType("liger_kernel.transformers")
    module._apply_liger_kernel_to_instance = lambda **kwargs: given.append(kwargs)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    model = Line()
    Trainer(model, _args(tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False}))
    assert given == [{"model": model, "rope": False}]
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.delitem(sys.modules, "liger_kernel.transformers")
    with pytest.raises(MissingExtraError, match='pip install "liger-kernel>='):
        Trainer(model, _args(tmp_path, use_liger_kernel=True))


# ---- evaluations -----------------------------------------------------------------------------------------------------


def test_metrics_get_inputs_and_losses_when_asked_for(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def metrics(result: EvalPrediction) -> dict[str, float]:
        seen.append(result)
        return {}

    class Named(Line):
        main_input_name = "x"

    args = _args(tmp_path, include_for_metrics=["inputs", "loss"], per_device_eval_batch_size=4)
    Trainer(Named(), args, eval_dataset=DATA, compute_metrics=metrics).evaluate()
    _, labels, inputs, losses = seen[0]
    assert inputs.tolist() == [[float(i)] for i in range(10)]
    assert labels.tolist() == [2.0 * i for i in range(10)]
    squares = (2 * np.arange(10.0)) ** 2  # each loss is that of its batch of 4, 4 and 2
    assert losses.tolist() == pytest.approx(
        [*[squares[:4].mean()] * 4, *[squares[4:8].mean()] * 4, *[squares[8:].mean()] * 2]
    )
    with pytest.raises(UsageError, match="the batch has no 'input_ids'"):
        Trainer(Line(), args, eval_dataset=DATA, compute_metrics=metrics).evaluate()


def test_metrics_batch_by_batch_learn_which_is_the_last(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []
    calls = []

    def metrics(result: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        kept.append(result.predictions - result.label_ids)
        calls.append(compute_result)
        return {"largest": float(torch.cat(kept).abs().max())} if compute_result else {}

    args = _args(tmp_path, batch_eval_metrics=True, per_device_eval_batch_size=4)
    trainer = Trainer(Line(), args, eval_dataset=DATA, compute_metrics=metrics)
    found = trainer.evaluate()
    assert calls == [False, False, True]
    assert found["eval_largest"] == 18.0
    assert found["eval_loss"] == pytest.approx(114.0)
    assert trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation").predictions is None  # nothing is kept
    with pytest.raises(UsageError, match="has no parameter compute_result"):
        Trainer(Line(), args, eval_dataset=DATA, compute_metrics=lambda result: {})
    calls.clear()
    kept.clear()
    output = trainer.predict(DATA[:9])
    assert calls == [False, False, True]
    assert output.metrics["test_largest"] == 16.0
    assert output.predictions.shape == output.label_ids.shape == (9,)  # a prediction is kept all the same
    calls.clear()
    assert trainer.predict([{"x": row["x"]} for row in DATA]).label_ids is None
    assert not calls  # without labels there are no metrics


def test_objects_are_gathered_when_asked_for(tmp_path: Path) -> None:
    class Boxes(nn.Module):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            return {"loss": x.sum(), "boxes": [{"box": row, "word": f"w{int(row)}"} for row in x]}

    args = _args(tmp_path, eval_use_gather_object=True, per_device_eval_batch_size=4)
    output = Trainer(Boxes(), args).predict(DATA)
    assert [sample["word"] for sample in output.predictions] == [f"w{i}" for i in range(10)]
    assert output.predictions[3]["box"].tolist() == [3.0]
    assert output.label_ids.tolist() == [2.0 * i for i in range(10)]


def test_an_infinite_loss_is_left_out_of_the_mean_of_an_evaluation(tmp_path: Path) -> None:
    data = [{"x": torch.tensor([1.0]), "labels": torch.tensor(value)} for value in (1.0, float("inf"), 3.0)]
    for filtered, expected in ((True, 5.0), (False, float("inf"))):
        args = _args(tmp_path, per_device_eval_batch_size=1, logging_nan_inf_filter=filtered)
        assert Trainer(Line(), args, eval_dataset=data).evaluate()["eval_loss"] == expected


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_and_logged_with_their_rate(tmp_path: Path) -> None:
    texts = [{**text, "attention_mask": torch.tensor([1, 1, 1, 0])} for text in TEXTS]

    def counts(data: Any, **options: Any) -> list[tuple[int, bool]]:
        args = _args(tmp_path, logging_strategy="steps", logging_steps=1, **options)
        tokenizer = type("Tokenizer", (), {"pad_token_id": 0, "save_pretrained": None})()
        trainer = Trainer(Words(), args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [(entry["num_input_tokens_seen"], "train_tokens_per_second" in entry) for entry in logs]

    assert counts(texts, include_num_input_tokens_seen="all") == [(8, True), (16, True)]
    assert counts(texts, include_num_input_tokens_seen="non_padding") == [(6, True), (12, True)]
    # 0 is the padding token: three of sixteen.
    assert counts(TEXTS, include_num_input_tokens_seen="non_padding")[-1] == (13, True)
    with pytest.raises(UsageError, match="cannot count tokens: the batch has no 'input_ids', only"):
        Trainer(Line(), _args(tmp_path, include_num_input_tokens_seen=True), train_dataset=DATA).train()


def test_the_rates_of_a_window_are_logged(tmp_path: Path) -> None:
    args = _args(tmp_path, logging_strategy="steps", logging_steps=2, log_throughput=True)
    trainer = Trainer(Line(), args, train_dataset=DATA)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["samples_per_second"] == pytest.approx(2 * entry["steps_per_second"], rel=1e-3)  # rounded to 3 digits
    assert entry["steps_per_second"] > 0


def test_batches_of_about_one_length(tmp_path: Path) -> None:
    lengths = torch.randint(1, 90, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    data = [{"input_ids": [1] * n, "labels": 1.0} for n in lengths]
    args = _args(tmp_path, train_sampling_strategy="group_by_length", gradient_accumulation_steps=2, seed=7)
    sampler = Trainer(Line(), args, train_dataset=data)._get_train_sampler()
    assert isinstance(sampler, LengthGroupedSampler)
    for epoch in (0, 1):
        # The rule of transformers: pieces of min(200 // (4 * 4), 50) = 12 updates of 4, sorted; the longest first.
        order = torch.randperm(200, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
        pieces = [sorted(order[i : i + 48], key=lambda i: -lengths[i]) for i in range(0, 200, 48)]
        best = max(range(5), key=lambda p: lengths[pieces[p][0]])
        pieces[0][0], pieces[best][0] = pieces[best][0], pieces[0][0]
        sampler.set_epoch(epoch)
        assert list(sampler) == [i for piece in pieces for i in piece]
        assert lengths[next(iter(sampler))] == max(lengths)

    seen: list[int] = []

    class Looks(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            seen.extend(inputs["n"].tolist())
            return super().training_step(model, {"x": inputs["x"], "labels": inputs["labels"]}, num_items_in_batch)

    rows = [{**row, "words": 10 - i, "n": i} for i, row in enumerate(DATA)]
    args = _args(
        tmp_path,
        train_sampling_strategy="group_by_length",
        length_column_name="words",
        num_train_epochs=2,
        remove_unused_columns=False,
    )
    Looks(Line(), args, train_dataset=rows).train()
    for epoch in (0, 1):
        expected = LengthGroupedSampler(2, lengths=[10 - i for i in range(10)], seed=42)
        expected.set_epoch(epoch)
        assert seen[10 * epoch : 10 * epoch + 10] == list(expected)
    with pytest.raises(UsageError, match="needs the length of each sample, but a sample has only x, labels"):
        Trainer(Line(), args, train_dataset=DATA).train()


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_orders_by_length_do_not_depend_on_the_split_of_an_exact_update(strategy: str, tmp_path: Path) -> None:
    lengths = torch.randint(1, 90, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    data = [{"input_ids": [1] * n, "labels": 1.0} for n in lengths]
    orders = []
    for size, accumulation in ((4, 1), (2, 1), (1, 4)):  # the second as on 2 processes
        args = _args(
            tmp_path, train_sampling_strategy=strategy, per_device_train_batch_size=size, parity="exact",
            gradient_accumulation_steps=accumulation, global_batch_size=4,
        )  # fmt: skip
        orders.append(list(Trainer(Line(), args, train_dataset=data)._get_train_sampler() or ()))
    assert orders[0] == orders[1] == orders[2]
    assert strategy == "group_by_length" or [len(batch) for batch in orders[0]] == [4] * 10


class _OwnLoader(Trainer):
    """Builds its loader as libraries do, from the batch size per process."""

    def get_train_dataloader(self) -> Any:
        size = self.args.per_device_train_batch_size if self.args.run_name == "fixed" else self.args.train_batch_size
        assert self.args.run_name == "fixed" or self._train_batch_size == size
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=size))


def test_a_loader_of_a_subclass_has_the_global_batches_of_exact_updates(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "parity": "exact"}
    for name, steps in (("as in the arguments", 3), ("fixed", 5)):  # of 10 samples
        trainer = _OwnLoader(Line(), _args(tmp_path, run_name=name, **sizes), train_dataset=DATA)
        texts = [text for text in warnings_of(trainer.train) if "get_train_dataloader" in text]
        assert trainer.state.global_step == steps
        assert trainer.args.train_batch_size == trainer._train_batch_size == 2
        assert len(texts) == (name == "fixed")
        assert all("batches of 2 samples, but global_batch_size is 4" in text for text in texts)


def test_the_batch_that_fits_is_found_and_the_total_stays(tmp_path: Path) -> None:
    assert smaller_batch_sizes(12, accumulation=1) == [6, 4, 3, 2, 1]
    assert smaller_batch_sizes(4, accumulation=3) == [3, 2, 1]

    class Small(Line):
        """Memory for four samples; it runs out in the third step, so that there is something to undo."""

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if self.training and len(x) > 2 and abs(self.layer.weight.item()) > 0.15:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x, labels)

    options = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "num_train_epochs": 2, "eval_strategy": "epoch"}
    args = _args(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=4, **options)
    trainer = Trainer(Small(), args, train_dataset=DATA[:8], eval_dataset=DATA)
    with pytest.warns(EchelonWarning, match="out of memory with a batch size of 4; the next attempt uses 2"):
        trainer.train()
    assert (trainer.state.train_batch_size, trainer.state.global_step) == (2, 4)
    assert trainer.get_total_train_batch_size() == 4
    assert args.per_device_train_batch_size == 4
    by_hand = _args(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, **options)
    plain = Trainer(Line(), by_hand, train_dataset=DATA[:8], eval_dataset=DATA)
    plain.train()
    assert _equal(_weights(trainer), _weights(plain))

    class Tiny(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if not self.training:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x, labels)

    with pytest.raises(UsageError, match="evaluation ran out of memory with batch size 8"):
        Trainer(Tiny(), args, train_dataset=DATA, eval_dataset=DATA).train()


def test_limits_shorten_passes_and_evaluations(tmp_path: Path) -> None:
    args = _args(tmp_path, limit_train_batches=3, limit_eval_batches=0.5, per_device_eval_batch_size=2)
    args.num_train_epochs = 2
    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA)
    assert trainer.train().global_step == 6
    x = torch.arange(4.0)  # two of five batches
    weight, bias = trainer.model.layer.weight.item(), trainer.model.layer.bias.item()
    expected = ((weight * x + bias - 2 * x) ** 2).mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.predict(DATA).predictions.shape == (10,)


def test_trying_out_runs_everything_once(tmp_path: Path) -> None:
    args = _args(tmp_path, fast_dev_run=True, eval_strategy="epoch", save_strategy="steps", report_to="csv")
    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA)
    assert trainer.train().global_step == 1
    assert [name for entry in trainer.state.log_history for name in entry if name.endswith("loss")] == [
        "loss",
        "eval_loss",
        "train_loss",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_training_ends_when_the_time_is_over(tmp_path: Path) -> None:
    ends = {"eval_strategy": "steps", "eval_steps": 100, "save_strategy": "steps", "save_steps": 100}
    trainer = Trainer(Line(), _args(tmp_path, max_time=1e-9, **ends), train_dataset=DATA, eval_dataset=DATA)
    assert trainer.train().global_step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 1
    assert Trainer(Line(), _args(tmp_path, max_time="1h"), train_dataset=DATA).train().global_step == 5


# ---- numbers that are not finite ---------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Its second layer can overflow; the loss can be asked to divide by zero."""

    def __init__(self, scale: float = 1.0, power: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 2), nn.Linear(2, 1)
        self.scale, self.power = scale, power
        nn.init.ones_(self.first.weight)
        nn.init.constant_(self.second.weight, scale)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(self.first(x)).squeeze(-1)
        return {"loss": ((y - labels).abs() ** self.power).mean(), "logits": y}


@pytest.mark.parametrize(
    ("model", "spoil", "message"),
    [
        (
            Deep(),
            {"x": torch.tensor([float("nan")])},
            "step 1 is not finite: 'x' in the batch contains 2 nan among 2 values",
        ),
        (Deep(3e38), {}, r"the output of second \(Linear\) contains \d inf among 2 values: its inputs are finite"),
        (
            Deep(power=0.5),
            {"x": torch.zeros(1), "labels": torch.zeros(())},
            "the gradient of second.bias contains 1 nan",
        ),
    ],
)
def test_the_first_bad_tensor_is_named_and_the_weights_stay(
    tmp_path: Path, model: Deep, spoil: dict[str, torch.Tensor], message: str
) -> None:
    data = [{"x": torch.full((1,), 4.0), "labels": torch.ones(()), **spoil} for _ in range(4)]
    if message.startswith("the gradient"):
        nn.init.zeros_(model.first.bias)
        nn.init.zeros_(model.second.bias)  # sqrt(0): finite, with an infinite slope
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(model, _args(tmp_path, stop_on_nan=True), train_dataset=data)
    with pytest.raises(NonFiniteError, match=message) as error:
        trainer.train()
    assert error.value.where == "step 1, epoch 0"
    assert isinstance(error.value, FloatingPointError)
    assert _equal([p.detach() for p in model.parameters()], before)
    assert not any(module._forward_hooks for module in model.modules())


def test_debugging_overflow_ends_at_the_module(tmp_path: Path) -> None:
    data = [{"x": torch.full((1,), 4.0), "labels": torch.ones(())} for _ in range(4)]
    model = Deep(3e38)
    trainer = Trainer(model, _args(tmp_path, debug="underflow_overflow"), train_dataset=data)
    with pytest.raises(
        NonFiniteError, match=r"the output of second \(Linear\).*; largest values before it: first [34]"
    ):
        trainer.train()
    assert not any(module._forward_hooks for module in model.modules())
    assert Trainer(Deep(), _args(tmp_path, debug="underflow_overflow", stop_on_nan=True), train_dataset=data).train()


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_logs_go_to_lines_and_columns_and_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from echelon.trackers import read_records

    args = _args(
        tmp_path, report_to=["tensorboard", "csv"], run_name="mine", logging_strategy="steps", logging_steps=2,
        eval_strategy="epoch",
    )  # fmt: skip
    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    trainer.end()
    folder = tmp_path / "runs" / "mine"
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = trainer.state.log_history
    assert [int(row["step"]) for row in rows] == [entry["step"] for entry in logged] == [2, 4, 5, 5]
    assert [row["loss"] for row in rows] == [str(entry.get("loss", "")) for entry in logged]
    assert float(rows[2]["eval_loss"]) == logged[2]["eval_loss"]
    records = list(read_records(folder / "metrics.jsonl"))
    assert records[0]["values"]["per_device_train_batch_size"] == 2
    assert [(r["step"], r["values"].get("train/loss")) for r in records[1:]] == [
        (entry["step"], entry.get("loss")) for entry in logged
    ]
    events = EventAccumulator(str(folder)).Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("train/loss")] == [
        (entry["step"], entry["loss"]) for entry in logged if "loss" in entry
    ]
    assert events.Scalars("eval/loss")[0].step == 5


def test_the_old_logging_dir_is_where_the_files_go(tmp_path: Path) -> None:
    with pytest.warns(EchelonWarning, match="logging_dir"):
        args = _args(tmp_path, report_to="jsonl", logging_dir=str(tmp_path / "logs"))
    trainer = Trainer(Line(), args, train_dataset=DATA)
    trainer.train()
    trainer.end()
    assert (tmp_path / "logs" / "metrics.jsonl").is_file()


def test_a_notebook_shows_a_bar_and_a_table(tmp_path: Path) -> None:
    shown: list[str] = []

    def show(text: str) -> Any:
        shown.append(text)
        return shown.append

    args = _args(tmp_path, eval_strategy="epoch", logging_strategy="epoch", num_train_epochs=2)
    callback = NotebookProgressCallback(show)
    trainer = Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[callback])
    trainer.train()
    last = shown[-1]
    assert "<progress value='10' max='10'" in last
    assert last.count("<tr>") == 3
    losses = [f"<td>{entry['loss']:.6g}</td>" for entry in trainer.state.log_history if "loss" in entry]
    assert all(cell in last for cell in losses)
    assert "<th>validation loss</th>" in last


# ---- states of callbacks, checkpoints ----------------------------------------------------------------------------------


def test_the_last_checkpoint_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    assert get_last_checkpoint(tmp_path) is None
    assert get_last_checkpoint(tmp_path / "nowhere") is None
    for step in (2, 10, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        save_file({"weight": torch.ones(1)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
