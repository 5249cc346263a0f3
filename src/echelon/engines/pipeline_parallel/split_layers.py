"""Stages whose layers are split over further ranks (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from echelon.base.errors import ConfigError
from echelon.engines.pipeline_parallel.stages import StageCut

__all__ = ["require_whole_boundaries"]


def require_whole_boundaries(cut: StageCut, plan: Mapping[str, ParallelStyle]) -> None:
    """Check that each rank has the whole of what stages send to each other and of the last one's outputs.

    Args:
        cut: the modules of each stage.
        plan: the style of each module that is split.

    Raises:
        ConfigError: activations are split where a stage ends.
    """
    for name, style in plan.items():
        if isinstance(style, SequenceParallel) or not getattr(style, "use_local_output", True):
            raise ConfigError(
                f"{name} has the style {type(style).__name__} that leaves activations split (sequence parallelism or loss_parallel), "
                "but stages send each other whole ones",
                where="prepare_pipeline(), tp_size with pp_size",
                do="use 'colwise' and 'rowwise' styles with whole activations between them ('colwise_gather_output' for the head)",
            )
    for names in cut.stages:
        opened = None
        for name in names:
            found = plan.get(name)
            if isinstance(found, RowwiseParallel) and found.input_layouts == (Shard(-1),):
                if opened is None:
                    raise _refused(name)
                opened = None
            elif isinstance(found, ColwiseParallel) and found.output_layouts == (Shard(-1),):
                opened = name
        if opened is not None:
            raise _refused(opened)


def _refused(name: str) -> ConfigError:
    return ConfigError(
        f"a stage ends between {name!r}, whose features are split over the ranks of tp, and the layer that adds the parts again",
        where="prepare_pipeline(stages=)",
        do="put both layers in one stage",
    )
