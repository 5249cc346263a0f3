"""Stages of split layers send each other whole activations; other plans are refused by name."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from echelon.base.errors import ConfigError
from echelon.engines.pipeline_parallel.stages import StageCut, require_whole_boundaries

_PAIR = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def _cut(*stages: str) -> StageCut:
    return StageCut(stages=tuple(tuple(names.split()) for names in stages), kind="sequential")


def test_whole_activations_between_stages_are_accepted() -> None:
    require_whole_boundaries(_cut("0 1 2", "3"), _PAIR)
    require_whole_boundaries(_cut("0", "1 2"), {"0": ColwiseParallel(output_layouts=Replicate())})
    require_whole_boundaries(_cut("0", "1 2"), {"2": RowwiseParallel(input_layouts=Replicate())})
    # Layers inside the modules of a stage belong together.
    require_whole_boundaries(_cut("0", "1"), {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})


@pytest.mark.parametrize(
    ("cut", "plan", "text"),
    [
        (_cut("0 1", "2 3"), _PAIR, "stage ends between '0'"),
        (_cut("0 1", "2 3"), {"2": RowwiseParallel()}, "stage ends between '2'"),
        (_cut("0", "1"), {"1.norm": SequenceParallel()}, "1.norm has the style SequenceParallel"),
        (_cut("0", "1"), {"1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}, "loss_parallel"),
    ],
)
def test_split_activations_between_stages_are_refused(cut: StageCut, plan: dict[str, ParallelStyle], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        require_whole_boundaries(cut, plan)
    assert text in str(raised.value)
    assert raised.value.do
