"""The steps of models that exist only as a configuration, and what would make them smaller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from echelon.base.errors import UsageError
from echelon.plan.facts import Cluster, StepSettings
from echelon.plan.layouts import plan_layout
from echelon.plan.sources import ModelChoice, PlannedStep, model_step
from echelon.plan.verdict import Reserve, Traces, search

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 2000,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
SEQUENCE = 4096
NOTHING = Reserve(context=0, communicator=0, share=0.0)


def _step(folder: Path, name: str, **choice: Any) -> PlannedStep:
    config = getattr(transformers, f"{name}Config")(**SMALL, architectures=[f"{name}ForCausalLM"])
    config.save_pretrained(folder)
    return model_step(
        ModelChoice(path=str(folder), sequence=SEQUENCE, **choice), StepSettings(micro_batch=1, mixed_precision="bf16")
    )


def test_a_loss_in_chunks_is_proposed_where_the_logits_are_the_largest_tensor(tmp_path: Path) -> None:
    step = _step(tmp_path, "Llama")
    chunked = replace(step.settings, loss_chunk=1024)
    whole, less = (
        max(m.temporaries + m.activations for m in step.source.trace(s).moments) for s in (step.settings, chunked)
    )
    assert (
        whole - less > 1.5 * 4 * SEQUENCE * SMALL["vocab_size"]
    )  # tensors of the size of the logits, without a quarter
    cluster = Cluster(gpus_per_node=1, nodes=1, gpu_memory=(whole + less) // 2)
    verdict = search(Traces(step.source), step.layout(1), cluster, plan_layout, reserve=NOTHING)
    assert not verdict.fits
    (change,) = (one for one in verdict.changes if one.arguments == "TrainingArguments(loss_chunk=1024)")
    assert change.text == "compute the loss in chunks of 1024 tokens"
    assert change.candidate.plan.layout.settings == chunked


def test_a_model_that_changes_its_logits_has_no_loss_in_chunks(tmp_path: Path) -> None:
    step = _step(tmp_path, "Gemma2")
    with pytest.raises(UsageError, match="Gemma2ForCausalLM changes the logits that its head has computed"):
        step.source.trace(replace(step.settings, loss_chunk=1024))
