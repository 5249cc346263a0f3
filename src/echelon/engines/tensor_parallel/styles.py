"""The styles in which a module is split: torch's, under the names that transformers gives them in ``tp_plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle


class ReplicatedPartialGradient(ParallelStyle):
    """A module with whole parameters whose input is this rank's part of the heads, such as a norm of each head.

    Each rank computes the gradient of its own heads, so the parameters' gradient is the sum over ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.forward = partial(_with_local_parameters, module, module.forward)
        return module


def _with_local_parameters(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` with plain tensors in place of the module's DTensor parameters."""
    own: dict[str, Any] = module._parameters
    kept = dict(own)
    for name, parameter in kept.items():
        if isinstance(parameter, DTensor):
            own[name] = parameter.to_local(grad_placements=[Partial()])
    try:
        return forward(*args, **kwargs)
    finally:
        own.update(kept)


STYLES: dict[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),  # name before transformers 5
    "colwise_loss_parallel": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": ReplicatedPartialGradient,
    "replicate": lambda: None,
}
"""Functions that create the styles; None leaves the module whole on every rank."""

_EXPERTS = "experts are split by expert parallelism (ep_size)"
REFUSED = {
    "packed_colwise": "several projections are packed in one weight, and a checkpoint needs their rows in one block",
    "packed_rowwise": "several projections are packed in one weight, and a checkpoint needs their columns in one block",
    "moe_tp_experts": _EXPERTS,
    "moe_identity_expert": _EXPERTS,
    "grouped_gemm": _EXPERTS,
    "ep_dispatch_experts": _EXPERTS,
    "ep_router": _EXPERTS,
    "mla_kv_a_proj": "latent attention mixes split and whole parts in one projection",
}
"""Names in plans of transformers' models that are not supported, each with the reason."""


def style_of_name(name: str) -> ParallelStyle | None:
    """Return a new style for one of ``STYLES``."""
    return STYLES[name]()


def split_dim(style: ParallelStyle, module: nn.Module) -> int | None:
    """Return the dimension of the module's weight that ``style`` splits; None if the weight stays whole."""
    is_embedding = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        return 1 if is_embedding else 0
    if isinstance(style, RowwiseParallel):
        return 0 if is_embedding else 1
    return None


def mask_padding(module: nn.Embedding, layouts: Sequence[Placement]) -> None:
    """Make a split embedding treat ``padding_idx`` as a whole one does: its row gets no gradient from lookups.

    torch compares the index with the numbers of the rank's own rows, so the row of another token would lose its gradient. ``layouts``
    are those of the output.
    Source: torch.nn.Embedding.
    """
    padding = module.padding_idx
    if padding is None:
        return
    module.padding_idx = None
    module.register_forward_hook(partial(_detach_padding, padding, layouts))


def _detach_padding(
    padding: int, layouts: Sequence[Placement], _module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor
) -> torch.Tensor:
    """Return ``out`` without a way back to the weights at the positions of padding. The tokens are a DTensor."""
    is_padding = (args[0] == padding).unsqueeze(-1)
    assert isinstance(is_padding, DTensor)
    is_padding = is_padding.redistribute(placements=layouts)
    return torch.where(is_padding if isinstance(out, DTensor) else is_padding.to_local(), out.detach(), out)
