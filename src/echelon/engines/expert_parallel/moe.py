"""A mixture-of-experts layer whose experts can be divided among ranks."""

from __future__ import annotations

import inspect
import math

import torch
import torch.nn.functional as F
from torch import nn


class TopKRouter(nn.Module):
    """Choose ``top_k`` of ``num_experts`` for each token, and weights that sum to 1.

    Returns logits (tokens, num_experts), weights (tokens, top_k) and indices (tokens, top_k) of a (tokens, width) input.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017, without noise; weights as in Mixtral.
    """

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        nn.init.normal_(self.weight, std=1 / math.sqrt(width))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, weights and indices. The softmax has at least float32 precision."""
        logits = F.linear(hidden_states, self.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        values, index = torch.topk(logits.to(wide), self.top_k, dim=-1)
        # The softmax over the chosen logits is that over all, divided by the sum over the chosen ones.
        return logits, torch.softmax(values, dim=-1), index


class StackedExperts(nn.Module):
    """Gated feed-forward experts, whose weights are stacked in the first dimension: down(silu(gate(x)) * up(x)).

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        nn.init.normal_(self.gate_up_proj, std=1 / math.sqrt(width))
        nn.init.normal_(self.down_proj, std=1 / math.sqrt(hidden))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum (tokens, width) of the outputs of each token's experts (tokens, top_k)."""
        experts = top_k_index.reshape(-1)
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=self.num_experts)
        rows = hidden_states[torch.div(order, top_k_index.shape[1], rounding_mode="floor")]
        computed = self._grouped(rows, counts) if _has_grouped_mm(rows) else self._one_by_one(rows, counts)
        by_token = computed[torch.argsort(order)].view(*top_k_index.shape, hidden_states.shape[-1])
        return (by_token * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _one_by_one(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        found = []
        for expert, part in enumerate(torch.split(rows, counts.tolist())):
            gate, up = F.linear(part, self.gate_up_proj[expert]).chunk(2, dim=-1)
            found.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
        return torch.cat(found)

    def _grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = torch._grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer in which each token is computed by ``top_k`` of ``num_experts`` experts.

    With ``ParallelismConfig(ep_size=...)`` the experts are divided among ranks. Input and output: (..., width).
    """

    def __init__(self, width: int, hidden: int, *, num_experts: int, top_k: int = 2) -> None:
        super().__init__()
        self.gate = TopKRouter(width, num_experts, top_k)
        self.experts = StackedExperts(width, hidden, num_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output for each token; ``forward`` of ``gate`` gives the routing."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(tokens)
        output: torch.Tensor = self.experts(tokens, index, weights)
        return output.view_as(hidden_states)


def _has_grouped_mm(rows: torch.Tensor) -> bool:
    """Return whether one kernel computes all experts; torch's needs bfloat16 and a GPU (on CPUs it has no backward pass)."""
    return rows.dtype == torch.bfloat16 and rows.device.type == "cuda" and hasattr(torch, "_grouped_mm")


# ---- experts and routers of any model --------------------------------------------------------------------------------


_INPUTS = ("hidden_states", "top_k_index", "top_k_weights")


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold stacked experts, by name.

    These are ``StackedExperts`` and what transformers (5 or newer) has in Mixtral, Qwen2-MoE, Qwen3-MoE and others: modules with
    ``num_experts`` whose parameters have the experts in their first dimension, and whose ``forward`` takes ``hidden_states``,
    ``top_k_index`` and ``top_k_weights``.
    """
    found = {}
    for name, module in model.named_modules():
        num = getattr(module, "num_experts", None)
        own = list(module.parameters(recurse=False))
        if not isinstance(num, int) or not own or any(p.dim() < 2 or p.shape[0] != num for p in own):
            continue
        if tuple(inspect.signature(type(module).forward).parameters)[1:4] == _INPUTS:
            found[name] = module
    return found


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with ``top_k`` beside the experts, by name. They return logits, weights and indices of the chosen experts."""
    blocks = [name.rpartition(".")[0] for name in find_experts(model)]
    return {
        f"{block}.{name}".lstrip("."): module
        for block in blocks
        for name, module in model.get_submodule(block).named_children()
        if hasattr(module, "top_k")
    }
