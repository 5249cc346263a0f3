"""The options of tensor parallelism, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelOptions:
    """How the layers of a model are split."""

    mesh: DeviceMesh
    """1-D mesh of the ranks that hold the parts of one layer: a part of the mesh that ``ShardingOptions.mesh`` is a part of."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Styles by pattern of module names, added to the model's own plan."""
    num_chunks: int | None = None
    """Number of canonical chunks of each split dimension, on all ranks together, with which the results do not depend on the number of
    ranks. None: each rank computes its part at once."""
    loss_parallel: bool = False
    """Whether cross-entropy of logits that are split over the vocabulary is computed without gathering them."""
