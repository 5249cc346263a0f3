"""Training with sequences that are cut over ranks (cp: ring attention, sp: Ulysses) is that of one process with whole sequences."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from echelon import Accelerator, ParallelismConfig
from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.utils import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig, shift_labels
from tests.harness import errors_on_ranks, import_ahead, run_on_ranks
from tests.parallel_models import (
    CLIP,
    IGNORED,
    PlainRun,
    new_optimizer,
    num_tokens,
    plain_updates,
    ragged_batches,
    tiny_gpt,
    tiny_llama,
)
from tests.prepared_loop import whole

import_ahead("transformers.models.llama.modeling_llama")

_NUM_UPDATES = 5


def _model(kind: str) -> Any:
    if kind == "gpt":
        return tiny_gpt()
    return tiny_llama(num_kv_heads=2, attention="sdpa", tied=True)


def _positions(kind: str) -> torch.Tensor:
    """Return position ids; ``packed`` has documents of 3, 6 and 7 tokens."""
    return torch.cat([torch.arange(n) for n in ((3, 6, 7) if kind == "packed" else (16,))])[None]


def _logits(model: Any, batch: dict[str, torch.Tensor], kind: str, positions: torch.Tensor) -> torch.Tensor:
    if kind == "gpt":
        return model(batch["input_ids"], positions)  # type: ignore[no-any-return]
    ids = batch["position_ids"] if "position_ids" in batch else positions.expand(len(batch["input_ids"]), -1)
    return model(input_ids=batch["input_ids"], position_ids=ids).logits  # type: ignore[no-any-return]


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / max(1, num_tokens(labels))  # a piece may have no label that counts


@cache
def _reference(kind: str) -> PlainRun:
    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return _mean_loss(_logits(model, batch, kind, _positions(kind)), batch["labels"])

    return plain_updates(_model(kind), ragged_batches(2 * _NUM_UPDATES), loss=loss)


def _rows() -> list[dict[str, torch.Tensor]]:
    return [{k: v[i] for k, v in batch.items()} for batch in ragged_batches(2 * _NUM_UPDATES) for i in range(4)]


def _trained(sizes: dict[str, int], kind: str, strategy: str = "alltoall") -> dict[str, Any]:
    handler = TorchContextParallelConfig(cp_comm_strategy=strategy)
    accelerator = Accelerator(
        cpu=True,
        parity="exact",
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**sizes, cp_handler=handler),  # type: ignore[arg-type]
    )
    model = _model(kind)
    loader: Any = DataLoader(_rows(), batch_size=8)  # type: ignore[arg-type]
    optimizer = new_optimizer(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms, gradients = [], []
    for batch in loader:
        batch["position_ids"] = _positions(kind).expand(len(batch["input_ids"]), -1)
        with accelerator.accumulate(model), accelerator.context_parallel(list(batch.values())) as piece:
            assert batch["input_ids"].shape[1] == len(piece.positions) < piece.length
            loss = _mean_loss(_logits(model, batch, kind, piece.positions), batch["labels"])
            accelerator.backward(loss, num_items=num_tokens(batch["labels"]))
            if accelerator.sync_gradients:
                gradients.append({n: whole(p.grad) for n, p in model.named_parameters()})
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        assert batch["labels"].shape[1] == 16  # whole again
    return {
        "weights": {n: whole(p) for n, p in model.state_dict().items()},
        "gradients": gradients,
        "norms": norms,
        "loss": accelerator.update_loss(),
        "rank": accelerator.context_parallel_rank,
        "readers": accelerator.session.data_world.world_size,
    }


def _check_run(answer: dict[str, Any], reference: PlainRun) -> None:
    """float64: attention is summed in another order, which AdamW's division by small gradients enlarges."""
    for name, weight in reference.weights.items():
        torch.testing.assert_close(answer["weights"][name], weight, rtol=0, atol=5e-12)
    for own, theirs in zip(answer["gradients"], reference.gradients, strict=True):
        for name, gradient in theirs.items():
            # Attention does not depend on a bias of the keys: its gradient is rounding.
            assert (own[name] - gradient).norm() <= 5e-12 * gradient.norm() + 1e-16, name
    assert answer["norms"] == pytest.approx(reference.norms, rel=5e-12)
    assert answer["loss"] == pytest.approx(reference.losses[-1], rel=5e-12)


def _saved_bytes(size: int, axis: str) -> int:
    """Return the bytes of activations that autograd keeps for the backward pass."""
    accelerator, model = _prepared({f"{axis}_size": size} if size > 1 else {}, _model("gpt"))
    ids = torch.zeros(2, 64, dtype=torch.int64)
    kept: dict[tuple[int, int], int] = {}
    alive = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.shape[:1] == (2,):  # the batch comes first, but in no parameter
            storage = tensor.untyped_storage()
            kept[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with (
        accelerator.context_parallel([ids]) as piece,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept),
    ):
        out = model(ids, piece.positions)
    assert out.shape[1] == 64 // size
    return sum(kept.values())


@pytest.mark.soak  # in a worker that earlier tests have used, the first run on one rank keeps more than it does alone
@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_saved_activations_fall_with_the_number_of_ranks(axis: str) -> None:
    whole, half = (
        run_on_ranks(_saved_bytes, 1, axis, world_size=1)[0],
        run_on_ranks(_saved_bytes, 2, axis, world_size=2),
    )
    quarter = run_on_ranks(_saved_bytes, 4, axis, world_size=4)
    for size, found in ((2, half), (4, quarter)):
        for part in found:
            assert part == pytest.approx(whole / size, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "strategy"),
    [  # others are among the drawn programs on meshes
        ("llama", {"dp_shard_size": 2, "sp_size": 2}, "alltoall"),
        ("packed", {"dp_shard_size": 2, "cp_size": 2}, "alltoall"),
        pytest.param("gpt", {"cp_size": 4}, "allgather", marks=pytest.mark.soak),
        pytest.param("packed", {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2}, "alltoall", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_updates_are_those_of_one_process(kind: str, sizes: dict[str, int], strategy: str) -> None:
    world_size, cp, tp = math.prod(sizes.values()), sizes.get("cp_size", 1), sizes.get("tp_size", 1)
    answers = run_on_ranks(_trained, sizes, kind, strategy, world_size=world_size, timeout=180)
    _check_run(answers[0], _reference(kind))
    assert [answer["rank"] for answer in answers] == [rank // tp % cp for rank in range(world_size)]
    assert {answer["readers"] for answer in answers} == {sizes.get("dp_shard_size", sizes.get("dp_replicate_size", 1))}


def _tokens() -> dict[str, torch.Tensor]:
    batch = ragged_batches(1)[0]
    return {**batch, "positions": torch.arange(16)[None].expand(4, -1)}


def _prepared(sizes: dict[str, int], model: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))  # type: ignore[arg-type]
    return accelerator, accelerator.prepare(model)


def _blocks() -> dict[str, Any]:
    """Use the block in the ways of scripts, in one process group."""
    found: dict[str, Any] = {}
    accelerator, model = _prepared({"cp_size": 2}, _model("gpt"))
    batch = _tokens()
    whole = {name: tensor.clone() for name, tensor in batch.items()}
    view = batch["labels"][:2]  # shares the storage of a buffer
    with accelerator.maybe_context_parallel(
        buffers=[batch["input_ids"], batch["labels"], batch["positions"]],
        buffer_seq_dims=[1, 1, 1],
        no_restore_buffers={batch["input_ids"]},
    ):
        found["cut"] = batch["positions"][0].tolist()
        found["drawn"] = torch.rand(4).tolist()
        model(batch["input_ids"], batch["positions"]).sum().backward()
    found["after"] = torch.rand(4).tolist()
    found["restored"] = all(torch.equal(batch[name], whole[name]) for name in ("labels", "positions"))
    found["view"] = torch.equal(view, whole["labels"][:2])
    found["kept"] = batch["input_ids"].shape[1]
    with torch.no_grad():  # evaluation of whole sequences on each rank needs no block
        found["evaluated"] = model.eval()(whole["input_ids"], whole["positions"]).shape[1]
    model.train()
    return found


def test_buffers_are_cut_inside_the_block_and_whole_after_it() -> None:
    first, second = run_on_ranks(_blocks, world_size=2)
    assert first["cut"] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert second["cut"] == list(range(4, 12))
    for answer in (first, second):
        assert answer["restored"]
        assert answer["view"]
        assert (answer["kept"], answer["evaluated"]) == (8, 16)
    assert first["drawn"] != second["drawn"]  # dropout is of other positions
    assert first["after"] == second["after"]  # augmentation is of the same samples


def _mistake(kind: str) -> None:
    sizes = {"sp_size": 2} if kind == "heads" else {"cp_size": 2}
    batch = _tokens()
    if kind in ("labels", "4-D mask", "dropout"):
        accelerator, model = _prepared(
            sizes, tiny_llama(attention="sdpa", attention_dropout=0.1 if kind == "dropout" else 0.0)
        )
        with accelerator.context_parallel([batch["input_ids"], batch["labels"]]):
            more = {"labels": {"labels": batch["labels"]}, "4-D mask": {"attention_mask": torch.ones(4, 1, 8, 8)}}
            model(input_ids=batch["input_ids"], **more.get(kind, {}))
        return
    if kind == "attention module":
        accelerator, attention = _prepared(sizes, torch.nn.MultiheadAttention(8, 2, batch_first=True))
        x = torch.randn(2, 16, 8)
        with accelerator.context_parallel([x]):
            attention(x, x, x)
        return
    accelerator, model = _prepared(sizes, tiny_gpt(num_heads=1) if kind == "heads" else tiny_gpt())
    ids = batch["input_ids"][:, :14] if kind == "length" else batch["input_ids"]
    with accelerator.context_parallel([] if kind == "no buffers" else [ids]):
        if kind == "mask":
            q = torch.randn(4, 2, 8, 4)
            F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool))
        if kind == "other length":
            q = torch.randn(4, 2, 6, 4)
            F.scaled_dot_product_attention(q, q, q)
        if kind == "positions":
            model(ids)
        if kind == "heads":
            q = torch.randn(4, 1, 8, 4)
            F.scaled_dot_product_attention(q, q, q)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "error", "texts"),
    [
        ("labels", UsageError, ["shifts labels inside this rank's piece", "echelon.utils.shift_labels"]),
        ("4-D mask", UsageError, ["attention_mask of shape (4, 1, 8, 8)"]),
        ("dropout", ConfigError, ["attention dropout 0.1 does not work with cp_size=2", "sp_size"]),
        ("attention module", UsageError, ["torch.nn.MultiheadAttention", "scaled_dot_product_attention"]),
        ("length", ConfigError, ["a sequence of 14 positions", "multiple of 4"]),
        ("no buffers", UsageError, ["no buffers were given"]),
        ("mask", UsageError, ["attn_mask=) of shape (8, 8)", "document_ids"]),
        ("other length", UsageError, ["has 8 of the sequence's 16 positions"]),
        ("heads", ConfigError, ["1 attention heads cannot be divided among 2 ranks", "cp_size"]),
        ("positions", EchelonWarning, ["torch.arange(8) inside context_parallel()", "piece.positions"]),
        ("nothing", EchelonWarning, ["no attention was computed inside"]),
    ],
)
def test_mistakes_are_named(kind: str, error: type[Exception], texts: list[str]) -> None:
    for text in errors_on_ranks(error, _mistake, kind, world_size=2):
        assert all(part in text for part in texts), text


class _Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)[:, None]
        out: torch.Tensor = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return out


def _with_batch_norm() -> None:
    accelerator = Accelerator(cpu=True, parity="exact", parallelism_config=ParallelismConfig(cp_size=2))
    model: Any = _Normed()
    loader: Any = DataLoader(torch.randn(4, 16, 8), batch_size=4)  # type: ignore[arg-type]
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for x in loader:
        with accelerator.context_parallel([x]):
            accelerator.backward(model(x).square().mean())


def test_a_batch_norm_over_pieces_is_named() -> None:
    (text,) = errors_on_ranks(EchelonWarning, _with_batch_norm, world_size=2, num_errors=1)
    assert "1 BatchNorm layer(s) that compute statistics per micro-batch" in text


def _outside() -> None:
    _, model = _prepared({"cp_size": 2}, tiny_gpt())
    model(torch.zeros(1, 16, dtype=torch.int64))


def test_a_forward_pass_outside_the_block_is_named() -> None:
    (text,) = errors_on_ranks(EchelonWarning, _outside, world_size=2, num_errors=1)
    assert "cp_size=2, but FSDPTinyGPT ran outside accelerator.context_parallel()" in text


def test_settings_of_accelerate_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ParallelismConfig(cp_size=2).cp_handler.cp_comm_strategy == "allgather"
    assert ParallelismConfig(sp_size=2).sp_handler.sp_seq_length_is_variable
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    for call, text in [
        (lambda: TorchContextParallelConfig(cp_comm_strategy="ring"), "use one of allgather, alltoall"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False), "needs sp_seq_length"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"), "use 'sdpa'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            call()


def test_labels_are_shifted_over_the_whole_sequence() -> None:
    assert shift_labels(torch.tensor([[1, 2, 3], [4, 5, -100]])).tolist() == [[2, 3, -100], [5, -100, -100]]
