"""What the search of a layout for a model with 70 billion parameters costs, counted in work, which does not depend on the machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from echelon.plan import layouts
from echelon.plan.facts import Cluster, LayoutPlan, StepSettings
from echelon.plan.sources import ModelChoice, model_step
from echelon.plan.trace import TracedStep
from echelon.plan.verdict import Traces, search


@pytest.mark.soak
def test_the_search_for_70_billion_parameters_traces_few_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    config.update({"vocab_size": 128256, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    config.save_pretrained(tmp_path)
    done: Counter[str] = Counter()
    observe, trace = TracedStep.observe, TracedStep.trace

    def observed(*args: Any) -> None:
        done["operators"] += 1
        observe(*args)

    def traced(*args: Any) -> Any:
        done["traces"] += 1
        return trace(*args)

    def planned(*args: Any) -> LayoutPlan:
        done["moments"] += len(args[1].moments)
        return layouts.plan_layout(*args)

    monkeypatch.setattr(TracedStep, "observe", observed)
    monkeypatch.setattr(TracedStep, "trace", traced)
    step = model_step(ModelChoice(path=str(tmp_path), sequence=4096), StepSettings(1, "bf16"))
    cluster = Cluster(gpus_per_node=8, nodes=4, gpu_memory=85 * 10**9, device="H100", network="400Gb")
    verdict = search(Traces(step.source), step.layout(32), cluster, planned, variants=step.variants)
    assert verdict.best is not None
    assert len(verdict.candidates) > 40
    # Up to three micro-batches with four kinds of recomputation, and the loss in chunks. A trace of all 80 blocks has 38,000 operators, one of four blocks has 2,500.
    assert done["traces"] <= 14
    assert done["operators"] <= 12 * 3500
    # Of 10,000 to 20,000 moments of a trace, about a tenth can be peaks.
    assert done["moments"] <= 300_000
