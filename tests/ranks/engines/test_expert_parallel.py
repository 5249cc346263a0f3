"""Experts that are divided among ranks compute what one process computes, whatever the numbers of tokens.

The reference is a plain PyTorch loop in one process with the whole batch. Everything is float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, ParallelismConfig
from echelon.base.errors import ConfigError
from echelon.engines.expert_parallel.moe import MixtureOfExperts
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings, heard, whole

VOCABULARY, NUM_EXPERTS, UPDATES, ACCUMULATION, CLIP = 37, 8, 5, 2, 0.05

# Length of each rank's sequence, by micro-step. A sequence of one token has no loss.
_LENGTHS = [(14, 2, 9, 11 if step % 2 == 0 else 1) for step in range(UPDATES * ACCUMULATION)]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.moe = MixtureOfExperts(16, 12, num_experts=NUM_EXPERTS, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


class _Language(nn.Module):
    _no_split_modules = ("_Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _model(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "own":
        return _Language().double()
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2, "experts_implementation": "eager",
    }  # fmt: skip
    if kind == "mixtral":
        config: Any = transformers.MixtralConfig(intermediate_size=12, num_local_experts=NUM_EXPERTS, **sizes)
        return transformers.MixtralForCausalLM(config).double()
    sizes |= {"intermediate_size": 12, "moe_intermediate_size": 12, "num_experts": NUM_EXPERTS, "head_dim": 4}
    if kind == "qwen2":
        sizes.pop("head_dim")
        return transformers.Qwen2MoeForCausalLM(
            transformers.Qwen2MoeConfig(shared_expert_intermediate_size=12, decoder_sparse_step=1, **sizes)
        ).double()
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(decoder_sparse_step=1, **sizes)).double()


def _sequences(step: int, *, has_empty: bool) -> list[torch.Tensor]:
    """Return each rank's sequence of a micro-step."""
    generator = torch.Generator().manual_seed(100 + step)
    lengths = [0 if has_empty and n == 1 else n for n in _LENGTHS[step]]
    # Few different tokens in the first updates, so that some experts get none.
    high = 4 if step < 4 else VOCABULARY
    return [torch.randint(high, (n,), generator=generator) for n in lengths]


class _Float64(TorchFunctionMode):
    """Compute in float64 what transformers computes in float32 (norms, softmaxes), where rounding depends on the loss's scale."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **wide)


def _loss(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum over the tokens, and their number."""
    with _Float64():
        found = model(ids[None])
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return F.cross_entropy(logits[0, :-1], ids[1:], reduction="sum"), max(len(ids) - 1, 0)


def _routings(model: nn.Module, found: list[torch.Tensor]) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _module, _inputs, output: found.append(output[2].detach().clone()))


def _plain(kind: str) -> dict[str, Any]:
    model = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    routed: list[torch.Tensor] = []
    _routings(model, routed)
    gradients, norms, routings = [], [], []
    for update in range(UPDATES):
        optimizer.zero_grad()
        total, num = torch.zeros((), dtype=torch.float64), 0
        for step in range(update * ACCUMULATION, (update + 1) * ACCUMULATION):
            for ids in _sequences(step, has_empty=kind == "own"):
                loss, n = _loss(model, ids)
                total, num = total + loss, num + n
                routings.append(torch.cat([*routed]))
                routed.clear()
        (total / num).backward()
        gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return {"weights": weights, "gradients": gradients, "norms": norms, "routings": routings}


def _divided(kind: str, sizes: dict[str, int]) -> dict[str, Any]:
    layout = ParallelismConfig(**sizes)
    accelerator = Accelerator(
        cpu=True, parity="exact", gradient_accumulation_steps=ACCUMULATION, parallelism_config=layout
    )
    model = _model(kind)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    routed: list[torch.Tensor] = []
    _routings(model, routed)
    model, optimizer = accelerator.prepare(model, optimizer)
    gradients, norms, routings = [], [], []
    for step in range(UPDATES * ACCUMULATION):
        with accelerator.accumulate(model):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*ran outside accelerator.context_parallel")
                loss, num = _loss(model, _sequences(step, has_empty=kind == "own")[accelerator.process_index])
            routings.append(torch.cat([*routed]))
            routed.clear()
            accelerator.backward(loss / max(num, 1), num_items=num)
            if accelerator.sync_gradients:
                gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    held = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if "experts" in name}
    weights = {name: whole(p) for name, p in model.named_parameters()}
    exported = accelerator.get_state_dict(model)
    assert exported is None or all(torch.equal(exported[name], value) for name, value in weights.items())
    found = {"weights": weights, "gradients": gradients, "norms": norms, "routings": routings, "held": held}
    accelerator.end_training()
    return found


def _largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def _relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Iterator[float]:
    for name, value in expected.items():
        if float(value.norm()):
            yield float((found[name] - value).norm() / value.norm())


_LAYOUTS = {
    "ep 1": {"dp_shard_size": 4},
    "ep 2 x efsdp 2": {"dp_shard_size": 4, "ep_size": 2},
    "ep 4": {"dp_shard_size": 4, "ep_size": 4},
    "replicate 2 x ep 2": {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2},
    "ep 4 over shard 2 x cp 2": {"dp_shard_size": 2, "cp_size": 2, "ep_size": 4},
}


_SOAK = [
    ("own", "ep 4"),
    ("mixtral", "ep 4"),  # a rank without any token
    ("own", "ep 4 over shard 2 x cp 2"),  # without attention, any sequences are pieces of longer ones
    ("own", "ep 1"),
    ("own", "replicate 2 x ep 2"),
    ("mixtral", "ep 2 x efsdp 2"),
    ("qwen2", "ep 2 x efsdp 2"),
    ("qwen3", "ep 4"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("own", "ep 2 x efsdp 2"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in _SOAK),
    ],
)
def test_divided_experts_train_like_one_process(kind: str, layout: str) -> None:
    expected, ranks = _plain(kind), run_on_ranks(_divided, kind, _LAYOUTS[layout], world_size=4)
    for found in ranks:
        assert _largest(found["weights"], expected["weights"]) < 1e-13
        assert max(_relative(found["gradients"][0], expected["gradients"][0])) < 1e-14
        for ours, plain in zip(found["gradients"], expected["gradients"], strict=True):
            assert max(_relative(ours, plain)) < 1e-12  # at weights that differ by their tolerance
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-13, abs=0)
        assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-14, abs=0)
    for step in range(UPDATES * ACCUMULATION):
        for rank, found in enumerate(ranks):
            assert torch.equal(found["routings"][step], expected["routings"][step * 4 + rank])
    if kind == "own":
        num_held = NUM_EXPERTS // 4 if "replicate" not in layout else NUM_EXPERTS // 2
        for found in ranks:
            assert found["held"]["blocks.0.moe.experts.gate_up_proj"] == (num_held, 24, 16)


def _balanced_loss(model: Any, ids: torch.Tensor) -> Any:
    with _Float64():
        return model(ids[None], labels=ids[None], attention_mask=torch.ones(1, len(ids)), output_router_logits=True)


def _mixtral() -> Any:
    model = _model("mixtral")
    model.router_aux_loss_coef = 0.5  # so that a wrong one cannot hide
    return model


def _plain_balance(step: int) -> tuple[float, dict[str, torch.Tensor]]:
    """One process with the sequences of all ranks: mean loss over all tokens, and one balancing loss over all tokens."""
    model, losses, logits, num = _mixtral(), [], [], 0
    for ids in _sequences(step, has_empty=False):
        losses.append(_loss(model, ids)[0])
        with _Float64():
            logits.append(model(ids[None], output_router_logits=True).router_logits)
        num += len(ids) - 1
    tokens = torch.cat([torch.cat(layers) for layers in zip(*logits)])  # of all layers
    probabilities = torch.softmax(tokens, -1)
    chosen = F.one_hot(torch.topk(probabilities, 2).indices, NUM_EXPERTS).sum(1).double()
    balance = NUM_EXPERTS * (probabilities.mean(0) * chosen.mean(0)).sum()
    (torch.stack(losses).sum() / num + 0.5 * balance).backward()
    return balance.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def _balanced(step: int, sizes: dict[str, int]) -> tuple[float, dict[str, torch.Tensor]]:
    accelerator = Accelerator(cpu=True, parity="exact", parallelism_config=ParallelismConfig(**sizes))
    model: Any = _mixtral()
    model, _optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = _sequences(step, has_empty=False)[accelerator.process_index]
    output = _balanced_loss(model, ids)
    # One sequence has no token with a label: its loss is nan, but its tokens count for the balance.
    accelerator.backward(output.loss, num_items=len(ids) - 1)
    gradients = {name: whole(p.grad) for name, p in accelerator.unwrap_model(model).named_parameters()}
    accelerator.end_training()
    return output.aux_loss.item(), gradients


@pytest.mark.parametrize(
    ("step", "sizes"),
    [(1, {"dp_shard_size": 4, "ep_size": 2}), pytest.param(0, {"dp_replicate_size": 4}, marks=pytest.mark.soak)],
    ids=str,
)
def test_the_balancing_loss_counts_the_tokens_of_all_ranks(step: int, sizes: dict[str, int]) -> None:
    balance, expected = _plain_balance(step)
    for own, gradients in run_on_ranks(_balanced, step, sizes, world_size=4):
        assert own == pytest.approx(balance, rel=1e-14)
        assert max(_relative(gradients, expected)) < 1e-13


def _padded() -> list[float]:
    """Five samples in batches of three: a rank has none in the last one."""
    accelerator = Accelerator(cpu=True, parity="exact")
    model: Any = _mixtral()
    ids = torch.stack([torch.arange(4) + i for i in range(5)])
    loader: Any = DataLoader(TensorDataset(ids), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    found = []
    for (rows,) in loader:
        with _Float64():
            output = model(rows, labels=rows, output_router_logits=True)
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(output.aux_loss.item())
    accelerator.end_training()
    return found


def test_copies_of_samples_do_not_count_for_the_balance() -> None:
    (alone,) = run_on_ranks(_padded, world_size=1)
    for found in run_on_ranks(_padded):
        assert found == pytest.approx(alone, rel=1e-13)


def _near_tie(gap: float) -> tuple[list[str], str]:
    accelerator = Accelerator(cpu=True, parity="exact")
    model: Any = MixtureOfExperts(4, 4, num_experts=3, top_k=1).double()
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.weight[:, 0] = torch.tensor([1.0, 1.0 - gap, 0.5], dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with all_warnings() as caught:
        for _ in range(2):
            rank = accelerator.process_index
            accelerator.backward(model(torch.ones(2, 4, dtype=torch.float64) * (1 + rank)).sum())
            optimizer.step()
    with heard("echelon") as lines:
        accelerator.end_training()
    return [str(one.message) for one in caught if "experts' scores" in str(one.message)], "\n".join(lines)


def test_the_smallest_routing_gap_is_reported() -> None:
    (said, line), _ = run_on_ranks(_near_tie, 0.25)
    assert said == []
    assert "smallest routing gap of the run: 2.5e-01 of a token's largest score" in line
    (said, line), _ = run_on_ranks(_near_tie, 1e-14)
    assert "differ by 1.0e-14" in said[0]
    assert "smallest routing gap of the run: 1.0e-14" in line


def _refused(kind: str) -> str:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, ep_size=2))
    model: Any = nn.Linear(2, 2) if kind == "none" else MixtureOfExperts(4, 4, num_experts=3)
    with pytest.raises(ConfigError) as found:
        accelerator.prepare(model)
    accelerator.end_training()
    return str(found.value)


def test_models_whose_experts_cannot_be_divided_are_refused_by_name() -> None:
    for text in run_on_ranks(_refused, "none"):
        assert "no experts were found in Linear" in text
        assert "ep_size=2" in text
    for text in run_on_ranks(_refused, "odd"):
        assert "the 3 experts of experts cannot be divided among 2 ranks" in text
        assert "set ep_size to a divisor of 3" in text
