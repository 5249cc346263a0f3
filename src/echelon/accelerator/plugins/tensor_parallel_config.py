"""``TorchTensorParallelConfig``: how the layers of a model are split over the ranks of the ``tp`` axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.base.errors import ConfigError
from echelon.base.keywords import suggest_keywords

__all__ = ["TorchTensorParallelConfig"]


@suggest_keywords
@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism, for ``ParallelismConfig(tp_handler=)``.

    Raises:
        ConfigError: an option has the wrong type, or is not supported.
    """

    enable_async_tp: bool = False
    """Not supported, as in Accelerate."""
    plan: dict[str, Any] | None = None
    """Styles by pattern of module names, such as ``{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}``. A style is an object from
    ``torch.distributed.tensor.parallel`` or a name as in the ``tp_plan`` of transformers' models; ``"replicate"`` keeps a layer
    whole. The patterns are added to the model's own plan, and take precedence. None: only the model's own plan."""
    loss_parallel: bool = False
    """Whether cross-entropy works on logits that stay split over the vocabulary, without gathering them. The plan must leave them
    split: ``{"lm_head": "colwise_loss_parallel"}``."""

    canonical_chunks: int | None = None
    """With ``parity="bitwise"``, the number of parts into which each split dimension is divided, the same in every run that must match
    bit for bit: a power of two that divides the heads, features and vocabulary, and is at least ``tp_size``. With a ``tp_handler``,
    one rank (``tp_size=1``) computes the same parts. Default: 8."""

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise ConfigError(
                "enable_async_tp=True is not supported",
                where="code TorchTensorParallelConfig(enable_async_tp=)",
                do="remove it",
            )
        chunks = self.canonical_chunks
        if chunks is not None and (not isinstance(chunks, int) or chunks < 1 or chunks & (chunks - 1)):
            raise ConfigError(
                f"canonical_chunks={chunks!r} is no power of two, so the sums over the chunks have no binary tree",
                where="code TorchTensorParallelConfig(canonical_chunks=)",
                do="set 1, 2, 4, 8 or a larger power of two",
            )
        if self.plan is not None and not (
            isinstance(self.plan, dict) and all(isinstance(key, str) for key in self.plan)
        ):
            raise ConfigError(
                f"plan is not a dict with patterns of module names as keys, but {self.plan!r}",
                where="code TorchTensorParallelConfig(plan=)",
                do="pass a dict such as {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}",
            )
