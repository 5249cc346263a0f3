"""``loss_chunk``: a Trainer's updates are those of the whole logits, on every engine that can, and the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.trainer import Trainer, TrainerCallback
from tests.harness import errors_on_ranks, import_ahead, run_on_ranks
from tests.parallel_models import VOCABULARY, loss_without_float32, tiny_gpt, tiny_llama
from tests.prepared_loop import whole
from tests.reference import permutation
from tests.trainer_models import CONSTANT_SGD, arguments

import_ahead("transformers.models.llama.modeling_llama")

_ROWS, _BATCH = 12, 4


def _data() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (_ROWS, 9), generator=torch.Generator().manual_seed(2))
    labels = tokens.masked_fill(torch.arange(9) < torch.arange(_ROWS)[:, None] % 4, -100)
    return [{"input_ids": row, "labels": targets} for row, targets in zip(tokens, labels)]


def _llama(**options: Any) -> Any:
    model: Any = tiny_llama(**options)
    model.loss_function = loss_without_float32  # transformers' own rounds to float32
    return model


class _Largest(TrainerCallback):
    """Notes the largest output of the head in training, and whether the model returns logits."""

    def __init__(self) -> None:
        self.shapes: set[int] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        head = kwargs["model"].get_output_embeddings()
        head.register_forward_hook(lambda _m, _i, out: self.shapes.add(out.shape[-1]))


def _trained(folder: str, engine: str) -> dict[str, Any]:
    shards: dict[str, Any] = (
        {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}} if engine == "fsdp2" else {}
    )
    options = {**({} if shards else {"engine": engine}), **shards}
    args = arguments(
        folder,
        **CONSTANT_SGD,
        parity="exact",
        global_batch_size=_BATCH,
        loss_chunk=5,
        logging_steps=1,
        eval_strategy="epoch",
        **options,
    )
    callback = _Largest()
    trainer = Trainer(
        _llama(tied=engine == "ddp"), args, train_dataset=_data(), eval_dataset=_data(), callbacks=[callback]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with torch.no_grad():
        row = {name: value[None] for name, value in _data()[0].items()}
        has_logits = trainer.model_wrapped.train()(**row)["logits"] is not None
    return {
        "losses": losses,
        "eval": next(e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e),
        "weights": [whole(p) for p in trainer.model.parameters()],
        "widths": callback.shapes,
        "has_logits": has_logits,
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(("engine", "world_size"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero1", 3)])
def test_updates_are_those_of_whole_logits(engine: str, world_size: int, tmp_path: Path) -> None:
    model = _llama(tied=engine == "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, order, data = [], permutation(_ROWS, seed=42, epoch=0), _data()
    for start in range(0, _ROWS, _BATCH):
        rows = [data[i] for i in order[start : start + _BATCH]]
        loss = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = model(**{name: torch.stack([row[name] for row in data]) for name in data[0]}).loss.item()
    for found in run_on_ranks(_trained, str(tmp_path), engine, world_size=world_size, timeout=120):
        assert found["losses"] == pytest.approx(losses, rel=1e-12, abs=0)
        assert found["eval"] == pytest.approx(evaluated, rel=1e-12, abs=0)
        for value, parameter in zip(found["weights"], model.parameters()):
            torch.testing.assert_close(value, parameter.detach(), rtol=0, atol=1e-12)
        # The head returns the hidden states (16) in training, and logits in evaluations; afterwards the model is as before.
        assert found["widths"] == {16, VOCABULARY}
        assert found["has_logits"]


class _Scaled(nn.Linear):
    """A head of another class."""


def _refused(folder: str, how: str) -> None:
    options: dict[str, Any] = {}
    model: Any = _llama()
    if how == "scaled":  # as Granite and Cohere do
        model.loss_function = lambda logits, **more: loss_without_float32(logits / 2, **more)
    elif how == "head":
        model.set_output_embeddings(_Scaled(16, VOCABULARY, bias=False).double())
    elif how == "gpt":
        model = tiny_gpt()
    elif how == "smoothing":
        options["label_smoothing_factor"] = 0.1
    elif how == "tp":
        options |= {"parallelism_config": {"tp_size": 2}, "parity": "exact"}
    args = arguments(folder, **CONSTANT_SGD, loss_chunk=5, **options)
    Trainer(model, args, train_dataset=_data()).train()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("scaled", "is not the cross-entropy of its head's outputs"),
        ("head", "the head of LlamaForCausalLM is a _Scaled, not a Linear"),
        ("gpt", "TinyGPT is not a causal language model of transformers"),
        ("smoothing", "the loss is computed outside the model"),
    ],
)
def test_a_model_or_setting_with_another_loss_is_refused(how: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        _refused(str(tmp_path), how)


def test_a_head_that_is_divided_over_ranks_is_refused(tmp_path: Path) -> None:
    texts = errors_on_ranks(UsageError, _refused, str(tmp_path), "tp")
    assert all("divide the head or its tokens over ranks" in text for text in texts)
