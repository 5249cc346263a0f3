"""How a plan says that axes divide a model is how the engine divides it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon import MixtureOfExperts
from echelon.engines.tensor_parallel.plan import resolve_plan
from echelon.engines.tensor_parallel.styles import split_dim as engine_split_dim
from echelon.plan.facts import Cluster, ParallelLayout, StepSettings
from echelon.plan.layouts import refusal
from echelon.plan.parallel_facts import add_parallel_facts
from echelon.plan.sharding import parameters_of_stage, split_dim
from tests.parallel_models import tiny_llama
from tests.plan_models import facts_of

SETTINGS = StepSettings(micro_batch=1)


def test_matrices_are_split_along_the_dimensions_of_the_engine() -> None:
    model = tiny_llama(num_heads=4, num_kv_heads=2)
    facts = add_parallel_facts(model, facts_of(model))
    planned = {p.name: split_dim(p.tp_style) for p in facts.parameters if p.tp_style}
    expected = {}
    for name, style in resolve_plan(model, {}, tp_size=2).items():
        module = model.get_submodule(name)
        dim = engine_split_dim(style, module)
        if dim is not None and isinstance(module, nn.Linear | nn.Embedding):
            expected[f"{name}.weight"] = dim
    assert planned == expected
    assert len(planned) == 2 * 7 + 2  # two layers, the embedding and the head
    assert set(facts.head_counts) == {4, 2}
    cluster = Cluster(8, 1, gpu_memory=2**30)
    assert refusal(facts, ParallelLayout("fsdp2", SETTINGS, tp=2), cluster) == ""
    assert "2 heads" in refusal(facts, ParallelLayout("fsdp2", SETTINGS, tp=4), cluster)


def test_a_decoder_is_cut_into_the_stages_of_the_engine() -> None:
    model = tiny_llama(num_layers=4)
    facts = add_parallel_facts(model, facts_of(model))
    layout = ParallelLayout("fsdp2", SETTINGS, pp=2, accumulation=4)
    first, last = (parameters_of_stage(facts, layout, stage) for stage in (0, 1))
    assert len(first) + len(last) == len(facts.parameters)
    assert first[0].name == "model.embed_tokens.weight"
    assert last[-1].name == "lm_head.weight"


def test_stacked_experts_are_found() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), MixtureOfExperts(8, 16, num_experts=4, top_k=2))
    facts = add_parallel_facts(model, facts_of(model))
    assert {p.name for p in facts.parameters if p.is_expert} == {"1.experts.gate_up_proj", "1.experts.down_proj"}


def test_frozen_norms_follow_trained_weights_to_float32() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(torch.bfloat16)
    model[1].requires_grad_(False)
    model[2].requires_grad_(False)
    facts = add_parallel_facts(model, facts_of(model))
    assert [p.name for p in facts.parameters if p.tensor.follows_masters] == ["1.weight", "1.bias"]
