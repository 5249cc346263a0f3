"""Small language models, ragged batches of tokens, and the plain loop in one process that runs on device meshes are compared with.

Every rank can compute the reference itself: ``plain_updates`` uses neither echelon nor a process group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 32
IGNORED = -100
CLIP = 0.5
GPT_PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.attention.[qkv]": "colwise",
    "blocks.*.attention.o": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}
"""How ``tiny_gpt`` is split by tensor parallelism."""


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        # Softmax ignores a bias of the keys: its gradient would be rounding errors only, which AdamW would amplify.
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=i != 1) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class _MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class GPTBlock(nn.Module):
    """Attention and MLP, with a norm before each of them."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), _Attention(width, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(width), _MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """A decoder of GPT's kind. ``forward`` returns the logits; of a piece of the sequence, it takes the positions."""

    _no_split_modules = ("GPTBlock",)
    checkpoints = False
    """Whether blocks are computed again in the backward pass."""

    def __init__(self, *, width: int, num_heads: int, num_layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(GPTBlock(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding(input_ids) + self.position(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints and torch.is_grad_enabled() else block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def tiny_gpt(
    *,
    width: int = 16,
    num_heads: int = 4,
    num_layers: int = 2,
    dropout: float = 0.0,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
) -> TinyGPT:
    """Return the same model in every process."""
    with _seeded(11):
        return TinyGPT(width=width, num_heads=num_heads, num_layers=num_layers, dropout=dropout, tied=tied).to(dtype)


def tiny_llama(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    num_layers: int = 2,
    tied: bool = False,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    **config: Any,
) -> Any:
    """Return transformers' Llama for causal language modelling, the same in every process.

    In float64, torch's RMSNorm takes the place of transformers', which computes in float32, as do the softmax of the attention
    ``eager`` and the loss that the model computes itself: their rounding errors depend on the scale of the loss.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    made: Any = LlamaConfig(  # untyped
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attn_implementation=attention,
        initializer_range=0.2,
        use_cache=False,
        **config,
    )
    with _seeded(12):
        model = LlamaForCausalLM(made).to(dtype)
    if dtype == torch.float64:
        use_exact_norms(model)
    return model


def use_exact_norms(model: Any) -> None:
    """Replace the norms of transformers' Llama, which compute in float32, by torch's in float64 with the same weights."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            exact = nn.RMSNorm(module.weight.shape[0], eps=model.config.rms_norm_eps, dtype=torch.float64)
            exact.weight = module.weight
            model.set_submodule(name, exact)


def ragged_batches(
    num_batches: int = 10, *, batch_size: int = 4, length: int = 16, seed: int = 5
) -> list[dict[str, torch.Tensor]]:
    """Return batches of ``input_ids`` and ``labels``; each sample has another number of labels that are not ignored.

    Labels are shifted already: ``labels[:, t]`` is the token after ``input_ids[:, t]``.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        tokens = torch.randint(VOCABULARY, (batch_size, length + 1), generator=generator)
        ends = torch.randint(2, length + 1, (batch_size, 1), generator=generator)
        labels = torch.where(torch.arange(length) < ends, tokens[:, 1:], IGNORED)
        batches.append({"input_ids": tokens[:, :-1].contiguous(), "labels": labels})
    return batches


def num_tokens(labels: torch.Tensor) -> int:
    """Return the number of labels that count."""
    return int((labels != IGNORED).sum())


def mean_loss(model: Callable[..., Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy over the labels that count; 0 without any."""
    out = model(input_ids=batch["input_ids"])
    logits = getattr(out, "logits", out)
    total = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )  # logits.float(), as in transformers' own loss, would round
    return total / max(1, num_tokens(batch["labels"]))


def loss_without_float32(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """transformers' loss in the dtype of the logits; its own is in float32, and its rounding depends on the size of a part."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shift_labels is None else shift_labels
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    # A piece of a sequence may have no labels.
    return total / ((targets != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with settings under which wrong gradients become large differences."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)


@dataclass(kw_only=True)
class PlainRun:
    """What the plain loop computed; gradients are those of each update before clipping."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def plain_updates(
    model: nn.Module,
    batches: Sequence[dict[str, torch.Tensor]],
    *,
    accumulation: int = 2,
    clip: float | None = CLIP,
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor] = mean_loss,
) -> PlainRun:
    """Train a copy of ``model`` in one process; ``accumulation`` batches are one update, whose loss is the mean over its tokens."""
    model = copy.deepcopy(model)
    optimizer = new_optimizer(model)
    run = PlainRun()
    for start in range(0, len(batches), accumulation):
        window = batches[start : start + accumulation]
        total = sum(num_tokens(batch["labels"]) for batch in window)
        summed = 0.0
        for batch in window:
            part = loss(model, batch) * (num_tokens(batch["labels"]) / total)
            part.backward()
            summed += part.item()
        run.losses.append(summed)
        run.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        limit = float("inf") if clip is None else clip
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield
