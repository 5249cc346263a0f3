"""parity="bitwise" with layers that are split over ranks: bit-identical weights for any number of ranks that share a layer."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel
from torch.utils.data import DataLoader

from echelon import Accelerator, ParallelismConfig
from echelon.base.errors import CheckpointError, ConfigError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.utils import TorchTensorParallelConfig
from tests.harness import errors_on_ranks, run_on_ranks
from tests.parallel_models import (
    CLIP,
    VOCABULARY,
    mean_loss,
    new_optimizer,
    num_tokens,
    plain_updates,
    ragged_batches,
    tiny_gpt,
    tiny_llama,
)

WIDTH, NUM_HEADS, DROPOUT = 32, 8, 0.1
SHARDS = 4  # batch shards of an update: 4 micro-steps on one reader of samples, 2 on each of two
PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
LAYOUTS: dict[str, dict[str, int]] = {
    "1": {},
    "tp 2": {"tp_size": 2},
    "tp 4": {"tp_size": 4},
    "shard 2 x tp 2": {"dp_shard_size": 2, "tp_size": 2},
    "shard 2": {"dp_shard_size": 2},
    "replicate 2": {"dp_replicate_size": 2},
}
UPDATES = 20


class _Block(nn.Module):
    """Dropout of attention weights, of split features and of whole activations; a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(4))
        self.head_norm = nn.RMSNorm(WIDTH // NUM_HEADS)  # its parameter is whole, and used with split activations
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norm1(x)
        q, k, v = (f(heads).unflatten(-1, (-1, WIDTH // NUM_HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            self.head_norm(q), k, v, is_causal=True, dropout_p=DROPOUT if self.training else 0.0
        )
        x = x + self.dropout(self.o(mixed.transpose(1, 2).flatten(2)))
        out: torch.Tensor = x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm2(x))))))
        return out


class _GPT(nn.Module):
    _no_split_modules = ("_Block",)

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.position.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def _qwen3() -> nn.Module:
    """Return a model whose own plan has norms of each head (``replicated_with_grad_allreduce``)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: Any = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=4,
        attention_dropout=DROPOUT,
        use_cache=False,
    )
    torch.manual_seed(12)
    model: nn.Module = Qwen3ForCausalLM(config)
    return model


def _build(kind: str) -> nn.Module:
    """Return the float32 model with this name, the same in every process."""
    name, _, tied = kind.partition(" ")
    if name == "qwen3":
        return _qwen3()
    if name == "llama":
        options = {"num_heads": 8, "num_kv_heads": 8, "attention_dropout": DROPOUT}
        model: nn.Module = tiny_llama(tied=bool(tied), dtype=torch.float32, **options)
        return model
    torch.manual_seed(11)
    return _GPT(tied=bool(tied))


def _accelerator(layout: str, plan: dict[str, Any] | None, **options: Any) -> Accelerator:
    given = {"canonical_chunks": 8, **options}
    handler = TorchTensorParallelConfig(plan=plan, canonical_chunks=given.pop("canonical_chunks"))
    config = ParallelismConfig(**LAYOUTS[layout], tp_handler=handler)
    defaults = {"cpu": True, "parity": "bitwise", "seed": 7, "canonical_shards": SHARDS}
    return Accelerator(parallelism_config=config, **{**defaults, **given})


def _loader(num_updates: int) -> DataLoader[Any]:
    """Return a loader of this many global batches of 8 samples, and one of 4."""
    batches = ragged_batches(2 * num_updates + 1)
    samples = [{name: tensor[i] for name, tensor in batch.items()} for batch in batches for i in range(4)]
    return DataLoader(samples, batch_size=8, shuffle=True)  # type: ignore[arg-type]


@dataclass(kw_only=True)
class _Run:
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def _train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, *, last: int | None = None) -> _Run:
    """Train until the loader ends, or the optimizer has made ``last`` steps."""
    run = _Run()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), num_items=num_tokens(batch["labels"]))
            if accelerator.sync_gradients:
                run.losses.append(accelerator.update_loss())
                run.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and accelerator.progress.step == last:
            break
    run.weights = accelerator.get_state_dict(model) or {}
    return run


def _plan_of(kind: str) -> dict[str, Any] | None:
    return PLAN if kind.startswith("gpt") else None


def _trained(kind: str, layout: str, num_updates: int, options: dict[str, Any] | None = None) -> _Run:
    accelerator = _accelerator(layout, _plan_of(kind), **(options or {}))
    model: Any = _build(kind)
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), _loader(num_updates))
    return _train(accelerator, model, optimizer, loader)


def _num_ranks(layout: str) -> int:
    return math.prod(LAYOUTS[layout].values())


@lru_cache(maxsize=8)
def _one_rank(kind: str, num_updates: int) -> _Run:
    run: _Run = run_on_ranks(_trained, kind, "1", num_updates, world_size=1)[0]
    return run


def _assert_equal(found: _Run, expected: _Run, *, weights: bool) -> None:
    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    if weights:
        assert set(found.weights) == set(expected.weights)
        assert [name for name, value in expected.weights.items() if not torch.equal(found.weights[name], value)] == []


_QUICK = [("gpt tied", "tp 2", 2)]
_ALL = [
    pytest.param(kind, layout, UPDATES, marks=pytest.mark.soak)
    for kind in ("gpt", "gpt tied", "llama", "llama tied", "qwen3")
    for layout in LAYOUTS
    if layout != "1"
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "num_updates"), [*_QUICK, *_ALL])
def test_weights_losses_and_norms_are_bit_identical_on_any_mesh(kind: str, layout: str, num_updates: int) -> None:
    """float32, with dropout, accumulation, clipping, AdamW, ragged token counts and a short last batch."""
    expected = _one_rank(kind, num_updates)
    assert len(set(expected.losses)) == num_updates + 1
    assert max(expected.norms) > CLIP
    runs = run_on_ranks(_trained, kind, layout, num_updates, world_size=_num_ranks(layout), timeout=600)
    for rank, run in enumerate(runs):
        _assert_equal(run, expected, weights=rank == 0)  # rank zero has the whole weights


@pytest.mark.parametrize(
    ("dtype", "relative"),
    [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-5, marks=pytest.mark.soak)],
)
def test_one_rank_in_chunks_matches_the_plain_loop(dtype: torch.dtype, relative: float) -> None:
    """Without dropout. The sums over chunks and shards are in another order than those of whole matrices, which leaves rounding errors
    of the dtype; AdamW divides small gradients by their size, and amplifies them.
    """
    batches = ragged_batches(10)
    plain = plain_updates(tiny_gpt(num_heads=8, dtype=dtype), batches)
    (run,) = run_on_ranks(_trained_plainly, dtype, world_size=1)
    assert run.losses == pytest.approx(plain.losses, rel=relative)
    assert run.norms == pytest.approx(plain.norms, rel=10 * relative)
    for name, value in plain.weights.items():
        assert (run.weights[name] - value).norm() <= 100 * relative * value.norm(), name


def _trained_plainly(dtype: torch.dtype) -> _Run:
    plan = {name.replace("blocks.*.", "blocks.*.*."): style for name, style in PLAN.items()}
    accelerator = _accelerator("1", plan)
    model: Any = tiny_gpt(num_heads=8, dtype=dtype)
    batches = ragged_batches(10)
    samples = [{name: tensor[i] for name, tensor in batch.items()} for batch in batches for i in range(4)]
    loader: Any = DataLoader(samples, batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), loader)
    return _train(accelerator, model, optimizer, loader)


# ---- other styles ----------------------------------------------------------------------------------------------------


class _Styles(nn.Module):
    """An embedding split by columns, a layer that takes its part of whole activations, and none that is whole between split ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(VOCABULARY, 16, padding_idx=1), nn.Linear(16, 16)
        self.second, self.third = nn.Linear(16, 24), nn.Linear(24, VOCABULARY)
        self.scale = nn.Parameter(torch.tensor(0.7))  # a scalar, used with whole and with split activations

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(input_ids) * self.scale).tanh()
        out: torch.Tensor = self.third(F.dropout(self.second(x), 0.1, self.training) * self.scale)
        return out


_STYLES = {
    "embedding": "embedding_colwise",
    "first": "rowwise_split_input",
    "second": ColwiseParallel(),
    "third": "rowwise",
}


def _styles(layout: str) -> _Run:
    accelerator = _accelerator(layout, _STYLES)
    torch.manual_seed(4)
    model: Any = _Styles()
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), _loader(2))
    return _train(accelerator, model, optimizer, loader)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp 2", pytest.param("shard 2 x tp 2", marks=pytest.mark.soak)])
def test_other_styles_and_whole_parameters_between_split_layers_are_bit_identical(layout: str) -> None:
    (expected,) = run_on_ranks(_styles, "1", world_size=1)
    for rank, run in enumerate(run_on_ranks(_styles, layout, world_size=_num_ranks(layout))):
        _assert_equal(run, expected, weights=rank == 0)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _part(layout: str, folder: str, num_updates: int, *, last: int | None, resumes: bool) -> _Run:
    """Train from the start or from the checkpoint in ``folder``; save after ``last`` updates."""
    accelerator = _accelerator(layout, PLAN)
    model: Any = _build("gpt tied")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if resumes else 1.0)
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), _loader(num_updates))
    if resumes:
        with (
            warnings.catch_warnings()
        ):  # expected where more ranks read samples than before; each shard seeds its own numbers
            warnings.filterwarnings("ignore", message=".*contains RNG states for", category=EchelonWarning)
            accelerator.load_state(folder)
    run = _train(accelerator, model, optimizer, loader, last=last)
    if last is not None:
        accelerator.save_state(folder)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp 2", "1"),
        *(
            pytest.param(saved, loaded, marks=pytest.mark.soak)
            for saved, loaded in (("tp 2", "tp 4"), ("shard 2 x tp 2", "tp 2"), ("1", "shard 2 x tp 2"))
        ),
    ],
)
def test_a_run_continues_on_another_mesh_within_an_epoch(saved: str, loaded: str, tmp_path: Path) -> None:
    expected, folder = _one_rank("gpt tied", 2), str(tmp_path / "state")
    first = run_on_ranks(_part, saved, folder, 2, last=1, resumes=False, world_size=_num_ranks(saved))[0]
    second = run_on_ranks(_part, loaded, folder, 2, last=None, resumes=True, world_size=_num_ranks(loaded))[0]
    found = _Run(weights=second.weights, losses=first.losses + second.losses, norms=first.norms + second.norms)
    _assert_equal(found, expected, weights=True)


def _saved_in_chunks(folder: str) -> None:
    accelerator = _accelerator("1", PLAN)
    accelerator.prepare(_build("gpt"))
    accelerator.save_state(folder)


def _loaded_in_chunks(folder: str, num_chunks: int | None) -> None:
    if num_chunks is None:
        accelerator = Accelerator(cpu=True, parity="bitwise", seed=7, canonical_shards=SHARDS)
    else:
        accelerator = _accelerator("1", PLAN, canonical_chunks=num_chunks)
    accelerator.prepare(_build("gpt"))
    accelerator.load_state(folder)


@pytest.mark.parametrize("num_chunks", [4, None])
def test_a_checkpoint_with_another_number_of_chunks_is_rejected(num_chunks: int | None, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    run_on_ranks(_saved_in_chunks, folder, world_size=1)
    (text,) = errors_on_ranks(CheckpointError, _loaded_in_chunks, folder, num_chunks, num_errors=1, world_size=1)
    assert f"canonical_chunks = 8, but this run has canonical_chunks = {num_chunks or 0}" in text
    assert "TorchTensorParallelConfig(canonical_chunks=8)" in text


# ---- what is refused -------------------------------------------------------------------------------------------------


class _Other(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _refused(kind: str) -> None:
    plans: dict[str, dict[str, Any]] = {
        "sequence": {"norm": SequenceParallel()},
        "layouts": {"head": ColwiseParallel(use_local_output=False)},
        "size": {"blocks.*.up": "colwise", "odd": "colwise"},
        "other": {"other": "colwise"},
        "whole": {"blocks.*.down": "rowwise"},
        "chunks": {"blocks.*.up": "colwise"},
        "columns": {"blocks.*.up": "colwise", "blocks.*.down": "colwise"},
    }
    model: Any = _build("gpt")
    model.odd, model.other = nn.Linear(8, 12), _Other(8, 8)
    options: dict[str, Any] = {"canonical_chunks": 4} if kind == "tp_size" else {}
    if kind == "key heads":
        model.config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=4)  # as transformers' models have
    if kind == "heads":
        tiny: Any = tiny_gpt(num_heads=4)
        tiny = _accelerator("1", {"blocks.*.attention.[qkv]": "colwise"}).prepare(tiny)
        tiny(torch.zeros(1, 4, dtype=torch.long))
    if kind == "loss_parallel":
        handler = TorchTensorParallelConfig(plan=PLAN, loss_parallel=True)
        Accelerator(cpu=True, parity="bitwise", parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
    if kind == "ranks":
        handler = TorchTensorParallelConfig(plan=PLAN, canonical_chunks=1)
        Accelerator(cpu=True, parity="bitwise", parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
    if kind == "exact":
        options["parity"] = "exact"
    if kind == "compiled":
        model.blocks[0] = torch.compile(model.blocks[0], dynamic=False, backend="eager")
    if kind == "context":
        config = ParallelismConfig(cp_size=2)
        Accelerator(cpu=True, parity="bitwise", parallelism_config=config)
    model = _accelerator("1" if kind == "read" else "tp 2", plans.get(kind, PLAN), **options).prepare(model)
    model(torch.zeros(1, 4, dtype=torch.long)).sum()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("sequence", ["norm (LayerNorm) has the style SequenceParallel(", "'colwise_gather_output'"]),
        ("layouts", ["head (Linear) has the style ColwiseParallel(", "use_local_output=False"]),
        ("size", ["odd has out_features=12, which cannot be divided into canonical_chunks=8 parts", "power of two"]),
        ("other", ["other (_Other) computes something else than nn.Linear", "'other': 'replicate'"]),
        ("whole", ["a layer with split input (style 'rowwise', in_features=128) got a whole activation"]),
        ("chunks", ["linear() failed on one of the 8 chunks of an activation", "the style 'rowwise'"]),
        ("columns", ["a layer with whole input (in_features=128) got an activation that is divided into chunks"]),
        (
            "key heads",
            ["_GPT has num_key_value_heads=4, which cannot be divided into canonical_chunks=8"],
        ),
        ("heads", ["unflatten() failed on one of the 8 chunks", "divides the number of heads"]),
        ("ranks", ["tp_size=2 does not divide canonical_chunks=1"]),
        ("loss_parallel", ["loss_parallel=True", "'colwise_gather_output'"]),
        ("exact", ["canonical_chunks=8 has no effect, because parity is 'exact'"]),
        ("compiled", ["torch.compile does not support layers that compute their canonical chunks"]),
        ("context", ["with cp_size, sums inside a sample", "use only data-parallel axes and tp_size"]),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(kind: str, parts: list[str]) -> None:
    error = UsageError if kind in ("whole", "chunks", "columns", "heads", "compiled") else ConfigError
    for text in errors_on_ranks(error, _refused, kind, num_errors=2):
        assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("chunks", [0, 6, -8, 2.0])
def test_a_number_of_chunks_that_is_no_power_of_two_is_refused(chunks: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no power of two"):
        TorchTensorParallelConfig(canonical_chunks=chunks)
