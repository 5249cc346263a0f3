"""A model in stages on all ranks (``prepare_pippy``) computes what the whole model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon import prepare_pippy
from echelon.base.errors import ConfigError
from tests.harness import errors_on_ranks, import_ahead, run_on_ranks
from tests.parallel_models import ragged_batches, tiny_llama

import_ahead("transformers.models.llama.modeling_llama", "torch.distributed.pipelining")


def _chain() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)).double()


def _inputs() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = ragged_batches(1, batch_size=7)[0]
    return x, {**batch, "attention_mask": (torch.arange(16) < torch.arange(10, 17)[:, None]).long()}


def _outputs(gather: bool) -> dict[str, Any]:
    x, batch = _inputs()
    decoder = tiny_llama(num_layers=4, tied=True).eval()
    found: dict[str, Any] = {}
    with torch.no_grad():
        # 7 rows in 3 chunks; the last one is shorter.
        model = prepare_pippy(decoder, num_chunks=3, gather_output=gather)
        out = model(**batch)
        found["logits"], found["loss"] = (None, None) if out is None else (out.logits, out.loss)
        found["parameters"] = [name for name, _ in model.named_parameters()]
        cut: Any = prepare_pippy(_chain(), split_points=["3"], example_args=(x[:1],), gather_output=gather)
        found["chain"], found["chain parameters"], found["points"] = (
            cut(x),
            len([*cut.parameters()]),
            cut.hf_split_points,
        )
    return found


@pytest.mark.parametrize("gather", [False, True])
def test_outputs_are_those_of_the_whole_model(gather: bool) -> None:
    x, batch = _inputs()
    with torch.no_grad():
        whole, chain = tiny_llama(num_layers=4, tied=True).eval()(**batch), _chain()(x)
    first, last = run_on_ranks(_outputs, gather, world_size=2)
    for answer in (first, last) if gather else (last,):
        torch.testing.assert_close(answer["logits"], whole.logits, rtol=0, atol=1e-13)
        torch.testing.assert_close(answer["loss"], whole.loss, rtol=1e-6, atol=0)  # float32 in transformers
        torch.testing.assert_close(answer["chain"], chain, rtol=0, atol=1e-13)
    if not gather:
        assert first["logits"] is first["chain"] is None
    # Each rank keeps its own layers.
    assert "model.layers.0.mlp.up_proj.weight" not in last["parameters"]
    assert "model.layers.3.mlp.up_proj.weight" not in first["parameters"]
    assert (first["chain parameters"], last["chain parameters"], last["points"]) == (4, 2, ["3"])


def _refused(points: list[str]) -> None:
    prepare_pippy(_chain(), split_points=points)


def test_wrong_split_points_are_refused() -> None:
    for text in errors_on_ranks(ConfigError, _refused, ["1", "2"], world_size=2):
        assert "['1', '2'] are not the beginnings of stages 2 to 2" in text
