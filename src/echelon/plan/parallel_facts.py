"""Reads from a model how the axes tp, ep and pp would divide it, and what float32 master weights cast beside trained weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from echelon.engines.expert_parallel.moe import find_experts
from echelon.engines.pipeline_parallel.stages import pieces_of
from echelon.engines.state_dicts import plain_name
from echelon.engines.tensor_parallel.plan import matches_pattern, model_configs, model_plan
from echelon.engines.tensor_parallel.styles import STYLES
from echelon.plan.facts import ModelFacts, ParameterFacts
from echelon.plan.fake_copy import cast_to_masters
from echelon.plan.sharding import split_dim
from echelon.plan.sizes import numel


def add_parallel_facts(model: nn.Module, facts: ModelFacts) -> ModelFacts:
    """Return ``facts``, which are those of ``model``, with what its own plan for tensor parallelism, its experts and its layers say."""
    styles = _styles(model)
    experts = {
        f"{name}.{own}".lstrip(".")
        for name, module in find_experts(model).items()
        for own, _p in module.named_parameters(recurse=False)
    }
    cast = {id(tensor) for tensor in cast_to_masters(model)}
    followers = {name for name, p in model.named_parameters() if not p.requires_grad and id(p) in cast}
    heads: list[Any] = [
        getattr(config, name, None)
        for config in model_configs(model)
        for name in ("num_attention_heads", "num_key_value_heads")
    ]
    parameters = []
    for p in facts.parameters:
        names = (p.name, *p.other_names)
        parameters.append(
            replace(
                p,
                tensor=replace(p.tensor, follows_masters=p.name in followers),
                tp_style=next((styles[name] for name in names if name in styles), ""),
                is_expert=p.name in experts,
            )
        )
    buffers = [
        replace(own, follows_masters=id(buffer) in cast)
        for own, buffer in zip(facts.buffers, model.buffers(), strict=True)
    ]
    pieces = tuple(pieces_of(model)[1])
    return replace(
        facts,
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        head_counts=tuple(count for count in heads if isinstance(count, int)),
        stage_pieces=pieces,
        piece_sizes=_piece_sizes(parameters, pieces),
    )


def _piece_sizes(parameters: Iterable[ParameterFacts], pieces: Iterable[Iterable[str]]) -> tuple[int, ...]:
    """Return the numbers by which ``prepare_pipeline`` balances stages: of the elements of each piece, and of its modules."""
    elements: Counter[str] = Counter()  # of each module, with those inside it
    for p in parameters:
        holders = {
            name.rsplit(".", cut)[0] for name in (p.name, *p.other_names) for cut in range(1, name.count(".") + 1)
        }
        elements.update(dict.fromkeys(holders, numel(p.tensor.shape)))
    return tuple(sum(1 + elements[module] for module in piece) for piece in pieces)


def _styles(model: nn.Module) -> dict[str, str]:
    """Return the style of each parameter that the model's own plan splits, by name."""
    found = {}
    plan = model_plan(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        # Later patterns take precedence.
        style = next((s for pattern, s in reversed(plan.items()) if matches_pattern(plain_name(name), pattern)), "")
        if style not in STYLES:
            continue
        if isinstance(module, nn.Embedding):
            style = "embedding_rowwise" if "rowwise" in style else "embedding_colwise" if "colwise" in style else style
        for own, parameter in module.named_parameters(recurse=False):
            dim = split_dim(style)
            if (
                dim is not None and dim < parameter.dim()
            ):  # rows are split, but not the bias of what they are added up to
                found[f"{name}.{own}"] = style
    return found
