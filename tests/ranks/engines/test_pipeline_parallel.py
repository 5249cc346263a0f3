"""Pipelines compute what one process computes on the whole batch, and refuse by name what they cannot."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator, ParallelismConfig
from tests.harness import import_ahead, run_on_ranks
from tests.parallel_models import (
    CLIP,
    IGNORED,
    PlainRun,
    new_optimizer,
    num_tokens,
    plain_updates,
    ragged_batches,
    tiny_llama,
)
from tests.prepared_loop import all_warnings, whole

import_ahead("transformers.models.llama.modeling_llama", "torch.distributed.pipelining")

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_NUM_UPDATES = 5


def _llama(num_layers: int = 8, *, tied: bool = False) -> Any:
    return tiny_llama(num_layers=num_layers, tied=tied)


def _loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    # transformers' own loss computes in float32
    total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
    return total / num_tokens(batch["labels"])


def _count(batch: Any) -> float:
    return float(num_tokens(batch["labels"]))


def _batches() -> list[dict[str, torch.Tensor]]:
    return ragged_batches(2 * _NUM_UPDATES, batch_size=8)


def _rows() -> list[dict[str, torch.Tensor]]:
    return [{k: v[i] for k, v in batch.items()} for batch in _batches() for i in range(8)]


@cache
def _reference(num_layers: int, tied: bool) -> PlainRun:
    return plain_updates(_llama(num_layers, tied=tied), _batches(), accumulation=2)


def _trained(
    sizes: dict[str, int], schedule: str, num_micro_batches: int, num_layers: int = 8, tied: bool = False
) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True, parity="exact", gradient_accumulation_steps=2, parallelism_config=ParallelismConfig(**sizes)
    )
    model = _llama(num_layers, tied=tied)
    pipeline = accelerator.prepare_pipeline(
        model, schedule=schedule, num_micro_batches=num_micro_batches, loss_fn=_loss, count_items=_count
    )
    # One global batch of the loader is a whole update.
    loader: Any = DataLoader(_rows(), batch_size=16)  # type: ignore[arg-type]
    optimizer, loader = accelerator.prepare(new_optimizer(model), loader)
    norms, gradients, losses = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            # Without cp_size and sp_size, the block does nothing.
            with accelerator.maybe_context_parallel(buffers=[*batch.values()], buffer_seq_dims=[1, 1]):
                losses.append(pipeline.step(batch).item())
            if accelerator.sync_gradients:
                gradients.append({n: whole(p.grad) for n, p in model.named_parameters()})  # type: ignore[arg-type]
                norms.append(accelerator.clip_grad_norm_(pipeline.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    outputs = pipeline.evaluate(_batches()[0])
    return {
        "weights": {n: whole(p) for n, p in model.named_parameters()},
        "gradients": gradients,
        "norms": norms,
        "losses": losses,
        "update_loss": accelerator.update_loss(),
        "outputs": outputs,
        "rank": accelerator.pipeline_parallel_rank,
    }


def _compare(answers: list[dict[str, Any]], reference: PlainRun, *, tied: bool = False) -> None:
    names: set[str] = set()
    for answer in answers:
        assert answer["norms"] == pytest.approx(reference.norms, rel=1e-14, abs=0)
        assert answer["update_loss"] == pytest.approx(reference.losses[-1], rel=1e-14, abs=0)
        for name, weight in answer["weights"].items():
            plain = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
            names.add(plain)
            torch.testing.assert_close(weight, reference.weights[plain], rtol=0, atol=1e-13)
            for own, theirs in zip(answer["gradients"], reference.gradients, strict=True):
                error = (own[name] - theirs[plain]).norm() / theirs[plain].norm()
                # Later updates start from weights that differ by rounding: up to 6e-15 between plain loops with other micro-batches.
                assert error < 1e-13, (name, error)
            first = (answer["gradients"][0][name] - reference.gradients[0][plain]).norm()
            assert first <= 1e-14 * reference.gradients[0][plain].norm(), name
    assert names == reference.gradients[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [s if s == "InterleavedZeroBubble" else pytest.param(s, marks=pytest.mark.soak) for s in SCHEDULES]
)
def test_two_stages_or_more_match_one_process(schedule: str) -> None:
    answers = run_on_ranks(_trained, {"pp_size": 2}, schedule, 4, world_size=2)
    _compare(answers, _reference(8, False))
    assert [answer["rank"] for answer in answers] == [0, 1]
    assert answers[0]["losses"] == answers[1]["losses"]  # equal on all ranks


_LAYOUTS: list[tuple[dict[str, int], str, bool]] = [  # sizes, schedule, and whether embeddings are tied
    *(({"pp_size": 4}, schedule, False) for schedule in SCHEDULES),
    *(({"pp_size": 2, "dp_shard_size": 2}, schedule, False) for schedule in SCHEDULES),
    ({"pp_size": 2, "dp_replicate_size": 2}, "1F1B", False),
    # Stages whose layers are split.
    ({"pp_size": 2, "tp_size": 2}, "1F1B", True),
    ({"pp_size": 2, "tp_size": 2}, "ZBVZeroBubble", False),
    ({"pp_size": 2, "tp_size": 2}, "Interleaved1F1B", False),
    ({"pp_size": 2, "dp_shard_size": 2, "tp_size": 2}, "1F1B", True),
    ({"pp_size": 2, "dp_shard_size": 2, "tp_size": 2}, "DualPipeV", False),
    ({"pp_size": 2, "dp_replicate_size": 2, "tp_size": 2}, "1F1B", False),
    # Stages of pieces of sequences.
    ({"pp_size": 2, "cp_size": 2}, "1F1B", False),
    ({"pp_size": 2, "cp_size": 2}, "ZBVZeroBubble", False),
    ({"pp_size": 2, "cp_size": 2}, "DualPipeV", False),
    ({"pp_size": 2, "sp_size": 2}, "Interleaved1F1B", False),
    ({"pp_size": 2, "cp_size": 2, "tp_size": 2}, "1F1B", False),
    ({"pp_size": 2, "cp_size": 2, "dp_shard_size": 2}, "InterleavedZeroBubble", False),
]


@pytest.mark.soak
@pytest.mark.parametrize(("sizes", "schedule", "tied"), _LAYOUTS, ids=str)
def test_pipelines_in_any_layout_match_one_process(sizes: dict[str, int], schedule: str, tied: bool) -> None:
    num_layers, num_micro_batches = 4 if tied else 8, 2 * sizes["pp_size"] if schedule == "DualPipeV" else 4
    world_size = math.prod(sizes.values())
    arguments = sizes, schedule, num_micro_batches, num_layers, tied
    answers = run_on_ranks(_trained, *arguments, world_size=world_size, timeout=120)
    _compare(answers, _reference(num_layers, tied), tied=tied)
    if "tp_size" in sizes and "cp_size" not in sizes:
        assert answers[0]["losses"] == answers[len(answers) // 2]["losses"]  # equal on all ranks of a pipeline


def _masked_batch(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a batch in which each row has other documents or padding, and the arguments that tell a plain model of them."""
    batch = ragged_batches(1, batch_size=8)[0]
    place = torch.arange(16).expand(8, -1)
    if kind == "packed":
        begin = torch.arange(4, 12)[:, None]  # of the second document of each row
        return batch, {"position_ids": torch.where(place < begin, place, place - begin)}
    real = place < torch.arange(9, 17)[:, None]
    return {**batch, "labels": batch["labels"].where(real, IGNORED)}, {"attention_mask": real.long()}


def _masked(kind: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parity="exact", parallelism_config=ParallelismConfig(pp_size=2, cp_size=2))
    model = _llama(4)
    pipeline = accelerator.prepare_pipeline(model, num_micro_batches=4, loss_fn=_loss, count_items=_count)
    batch, arguments = _masked_batch(kind)
    is_packed = kind == "packed"
    given = {**batch, **(arguments if is_packed else {})}
    rows = [{k: v[i] for k, v in given.items()} for i in range(8)]
    (given,) = accelerator.prepare(DataLoader(rows, batch_size=8))  # type: ignore[arg-type]
    buffers = [*given.values()]
    padding = None if is_packed else arguments["attention_mask"]
    with accelerator.context_parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers), padding_mask=padding):
        pipeline.step(given)
    return {n: whole(p.grad) for n, p in model.named_parameters()}  # type: ignore[arg-type]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_each_micro_batch_has_its_own_documents_and_padding(kind: str) -> None:
    model = _llama(4)
    batch, arguments = _masked_batch(kind)
    _loss(model(input_ids=batch["input_ids"], **arguments).logits, batch).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for answer in run_on_ranks(_masked, kind, world_size=4):
        for name, gradient in answer.items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 1e-13, (name, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"pp_size": 2}, pytest.param({"pp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.soak)],
    ids=str,
)
def test_tied_embeddings_stay_equal_and_count_once(sizes: dict[str, int]) -> None:
    answers = run_on_ranks(_trained, sizes, "1F1B", 4, 4, True, world_size=2 * sizes.get("dp_shard_size", 1))
    _compare(answers, _reference(4, True), tied=True)
    first, last = answers[0]["weights"]["model.embed_tokens.weight"], answers[-1]["weights"]["lm_head.weight"]
    assert torch.equal(first, last)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def _masks(rate: float) -> dict[str, Any]:
    """Return this stage's dropout masks in two steps and in a repetition of the second, and the states of the generator."""
    accelerator = Accelerator(cpu=True, parity="exact", parallelism_config=ParallelismConfig(pp_size=2))
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(rate), nn.Linear(16, 16), nn.Dropout(rate))
    pipeline = accelerator.prepare_pipeline(
        model, stages=[["0", "1"], ["2", "3"]], num_micro_batches=2, loss_fn=lambda out, batch: out.square().mean()
    )
    masks: list[torch.Tensor] = []
    for module in pipeline.stages.pieces:
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, args, out: masks.append((out == 0) & (args[0] != 0)))
    torch.manual_seed(7)
    x = torch.randn(8, 16)
    (x,) = accelerator.prepare(DataLoader(x, batch_size=8))  # type: ignore[arg-type]
    states = [torch.get_rng_state()]
    for _ in range(2):
        pipeline.step(x, 8)
        states.append(torch.get_rng_state())
    torch.set_rng_state(states[1])
    pipeline.step(x, 8)
    return {"masks": [torch.cat(masks[n : n + 2]) for n in (0, 2, 4)], "states": states}


def test_each_stage_drops_with_its_own_random_numbers() -> None:
    first, last = run_on_ranks(_masks, 0.5, world_size=2)
    for answer in (first, last):
        one, two, again = answer["masks"]
        assert 0.2 < one.float().mean() < 0.8
        assert not torch.equal(one[:4], one[4:])  # micro-batches
        assert not torch.equal(one, two)
        assert torch.equal(two, again)  # as after a resumption
    assert not torch.equal(first["masks"][0], last["masks"][0])
    # What the loop draws afterwards is equal on the ranks of a pipeline, as without stages.
    assert all(map(torch.equal, first["states"], last["states"]))
    assert not torch.equal(first["states"][0], first["states"][1])


def test_a_step_without_dropout_draws_no_random_numbers() -> None:
    for answer in run_on_ranks(_masks, 0.0, world_size=2):
        assert all(torch.equal(state, answer["states"][0]) for state in answer["states"])


# ---- batch norms -----------------------------------------------------------------------------------------------------


def _with_batch_norm(num_micro_batches: int) -> list[str]:
    accelerator = Accelerator(cpu=True, parity="exact", parallelism_config=ParallelismConfig(pp_size=2))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with all_warnings() as caught:
        accelerator.prepare_pipeline(
            model, schedule="GPipe", num_micro_batches=num_micro_batches, loss_fn=lambda out, _: out.square().mean()
        )
    return [str(one.message) for one in caught if "BatchNorm" in str(one.message)]


def test_batch_norms_over_micro_batches_are_named() -> None:
    (text,), other = run_on_ranks(_with_batch_norm, 2)
    assert "1 BatchNorm layer(s) that compute statistics per micro-batch" in text
    assert other == []  # rank zero warns for all ranks
    assert run_on_ranks(_with_batch_norm, 1) == [[], []]
