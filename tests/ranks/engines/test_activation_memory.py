"""Activations that autograd keeps for the backward pass, in bytes of a rank, fall with the number of ranks as docs/parallelism.md says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from echelon import Accelerator, ParallelismConfig
from echelon.utils import TorchTensorParallelConfig
from tests.harness import run_on_ranks
from tests.parallel_models import tiny_gpt
from tests.ranks.engines.test_tensor_parallel import GPT_PLAN, _sequence_parallel_plan

_ROWS, _LENGTH, _WIDTH, _LAYERS = 3, 64, 64, 2


def _kept(size: int, splits_sequences: bool) -> int:
    """Return the bytes of the activations of the blocks."""
    config = None
    if size > 1:
        plan: Any = _sequence_parallel_plan() if splits_sequences else GPT_PLAN
        config = ParallelismConfig(
            tp_size=size, tp_handler=TorchTensorParallelConfig(plan=plan, loss_parallel=splits_sequences)
        )
    model: Any = tiny_gpt(width=_WIDTH, num_heads=8, num_layers=_LAYERS)
    model = Accelerator(cpu=True, parallelism_config=config).prepare(model)
    kept: dict[tuple[int, int], int] = {}
    alive = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Rows come first, but in no parameter; means and log-sum-exps have no last dimension of features.
        if (
            own.is_floating_point()
            and own.dim() >= 2
            and own.shape[0] in (_ROWS, _ROWS * _LENGTH)
            and own.shape[-1] > 1
        ):
            storage = own.untyped_storage()
            kept[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
            alive.append((tensor, storage))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.zeros(_ROWS, _LENGTH, dtype=torch.int64))
    del out
    return sum(kept.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits_sequences", "whole"),
    [
        (False, 4 + 2 / _LAYERS),  # of each layer the inputs and outputs of two norms, and the last norm's
        pytest.param(True, 2 + 1 / _LAYERS, marks=pytest.mark.soak),  # the outputs of the norms, which are gathered
    ],
)
def test_what_is_split_falls_with_the_number_of_ranks(splits_sequences: bool, whole: float) -> None:
    """In units of T * d of a layer: q, k, v, the output of attention, and 8 of the MLP are split."""
    unit = _ROWS * _LENGTH * _WIDTH * _LAYERS * 8
    found = {n: run_on_ranks(_kept, n, splits_sequences, world_size=n)[0] / unit for n in (1, 2, 4)}
    split = found[1] - whole
    assert split == pytest.approx(14 if splits_sequences else 12, rel=0.1)
    for n in (2, 4):
        assert found[n] - whole == pytest.approx(split / n, rel=0.01)
