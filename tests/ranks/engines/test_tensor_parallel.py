"""Layers that are split over ranks (tensor parallelism) train like the plain loop in one process."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.utils.data import DataLoader

from echelon import Accelerator, ParallelismConfig
from echelon.base.errors import ConfigError
from echelon.utils import TorchTensorParallelConfig, load_checkpoint_in_model
from tests.harness import errors_on_ranks, run_on_ranks
from tests.parallel_models import (
    CLIP,
    GPT_PLAN,
    PlainRun,
    mean_loss,
    new_optimizer,
    num_tokens,
    plain_updates,
    ragged_batches,
    tiny_gpt,
    tiny_llama,
    use_exact_norms,
)
from tests.prepared_loop import whole

LAYOUTS = {
    "tp 2": {"tp_size": 2},
    "tp 4": {"tp_size": 4},
    "replicate 2 x tp 2": {"dp_replicate_size": 2, "tp_size": 2},
    "shard 2 x tp 2": {"dp_shard_size": 2, "tp_size": 2},
    "replicate 2 x shard 2 x tp 2": {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2},
}
MODELS = ("gpt", "gpt tied", "llama", "llama tied")
_ORDINARY = {("gpt", "replicate 2 x tp 2"), ("llama tied", "shard 2 x tp 2")}
_CASES = [
    pytest.param(kind, layout, marks=() if (kind, layout) in _ORDINARY else pytest.mark.soak)
    for kind in MODELS
    for layout in LAYOUTS
]


def build(kind: str) -> nn.Module:
    """Return the model with this name, the same in every process."""
    name, _, tied = kind.partition(" ")
    if name == "gpt":
        return tiny_gpt(tied=bool(tied))
    model: nn.Module = tiny_llama(tied=bool(tied))
    return model


@lru_cache(maxsize=4)
def plain(kind: str) -> PlainRun:
    """Return what one process computes."""
    return plain_updates(build(kind), ragged_batches())


def accelerator_on(
    sizes: dict[str, int], plan: dict[str, Any] | TorchTensorParallelConfig | None, **options: Any
) -> Accelerator:
    """Return an Accelerator with 2 micro-steps per update on the mesh ``sizes``."""
    handler = TorchTensorParallelConfig(plan=plan) if isinstance(plan, dict) else plan
    return Accelerator(
        cpu=True,
        parity="exact",
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**sizes, tp_handler=handler),
        **options,
    )


def loader_of_updates() -> DataLoader[Any]:
    """Return a loader whose global batches are the updates of ``plain``: two of its batches."""
    samples = [
        {name: tensor[i] for name, tensor in batch.items()}
        for batch in ragged_batches()
        for i in range(len(batch["labels"]))
    ]
    return DataLoader(samples, batch_size=8)  # type: ignore[arg-type]


def trained(accelerator: Accelerator, model: nn.Module) -> PlainRun:
    """Train on the batches of ``plain`` and return the same."""
    optimizer = new_optimizer(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of_updates())
    run = PlainRun()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), num_items=num_tokens(batch["labels"]))
            if accelerator.sync_gradients:
                run.losses.append(accelerator.update_loss())
                run.gradients.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
                run.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    run.weights = accelerator.get_state_dict(model) or {}
    return run


def _trained(kind: str, sizes: dict[str, int]) -> PlainRun:
    accelerator = accelerator_on(sizes, GPT_PLAN if kind.startswith("gpt") else None)
    return trained(accelerator, build(kind))


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, relative: bool) -> float:
    """Return the largest difference between tensors, absolute, or relative to the norm of each tensor."""
    assert set(found) == set(expected)
    worst = 0.0
    for name, value in expected.items():
        difference = (found[name] - value).norm() / value.norm() if relative else (found[name] - value).abs().max()
        worst = max(worst, float(difference))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), _CASES)
def test_split_layers_train_like_one_process(kind: str, layout: str) -> None:
    """float64: the sums are in another order. AdamW divides by a gradient's own size, and so amplifies the rounding errors of small
    gradients: its weights differ by up to 1.05e-12, depending on the processor."""
    sizes = LAYOUTS[layout]
    runs = run_on_ranks(_trained, kind, sizes, world_size=math.prod(sizes.values()), timeout=120)
    assert_like(runs, plain(kind), weights=4e-12)
    for other in runs[1:]:
        assert other.norms == runs[0].norms
        for mine, theirs in zip(runs[0].gradients, other.gradients):  # also of layers that every rank computes whole
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def _sequence_parallel_plan() -> dict[str, Any]:
    """Return the plan of torch's tutorial: activations between blocks are split over the tokens, logits over the vocabulary."""
    tokens, alike = Shard(1), Replicate()
    gathered = {"input_layouts": (tokens,), "desired_input_layouts": (alike,)}
    return {
        "embedding": RowwiseParallel(input_layouts=alike, output_layouts=tokens),
        "position": RowwiseParallel(input_layouts=alike, output_layouts=Shard(0)),
        "blocks.*.norm[12]": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(**gathered),
        "blocks.*.attention.[qkv]": "colwise",
        "blocks.*.attention.o": RowwiseParallel(output_layouts=tokens),
        "blocks.*.mlp": PrepareModuleInput(**gathered),
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }


def _trained_by_sequence(sizes: dict[str, int]) -> PlainRun:
    handler = TorchTensorParallelConfig(plan=_sequence_parallel_plan(), loss_parallel=True)
    accelerator = accelerator_on(sizes, handler)
    run = trained(accelerator, tiny_gpt())
    accelerator.free_memory()
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["shard 2 x tp 2", *(pytest.param(one, marks=pytest.mark.soak) for one in ("tp 2", "tp 4"))]
)
def test_split_sequences_and_logits_train_like_one_process(layout: str) -> None:
    """float64; softmax over parts of the vocabulary is another order of sums."""
    sizes = LAYOUTS[layout]
    runs = run_on_ranks(_trained_by_sequence, sizes, world_size=math.prod(sizes.values()), timeout=120)
    assert_like(runs, plain("gpt"), weights=5e-12)


def assert_like(runs: list[PlainRun], expected: PlainRun, *, weights: float) -> None:
    """Compare the first rank's run with the plain one; ``weights`` bounds the largest difference of a weight."""
    run = runs[0]
    assert largest_difference(run.weights, expected.weights, relative=False) < weights
    assert largest_difference(run.gradients[0], expected.gradients[0], relative=True) < 1e-14
    for mine, theirs in zip(run.gradients, expected.gradients):
        assert largest_difference(mine, theirs, relative=True) < weights
    # Of later updates, norms and losses follow from weights that differ by their bound.
    later = 1e-14 if weights <= 4e-12 else weights
    for found, plain_ones in ((run.norms, expected.norms), (run.losses, expected.losses)):
        assert found == pytest.approx(plain_ones, rel=later, abs=0)
        assert found[0] == pytest.approx(plain_ones[0], rel=1e-14, abs=0)


def _trained_presharded(sizes: dict[str, int], folder: str) -> PlainRun:
    """transformers splits the layers while it loads the weights."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    accelerator = accelerator_on(sizes, None)
    config = DistributedConfig(tp_size=sizes["tp_size"], tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, dtype=torch.float64, use_cache=False
    )
    use_exact_norms(model)
    return trained(accelerator, model.train())


def _save_pretrained(model: Any, folder: Path) -> None:
    """As ``model.save_pretrained``, which imports accelerate."""
    model.config.save_pretrained(folder)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.soak  # from_pretrained imports much on every rank
@pytest.mark.parametrize(
    "layout", ["tp 2", "tp 4"]
)  # transformers splits layers over all ranks that it does not shard over
@pytest.mark.parametrize("tied", [False, True])
def test_models_that_transformers_has_split_train_like_one_process(tied: bool, layout: str, tmp_path: Path) -> None:
    """float64: transformers' own forward passes of the split layers, echelon's updates."""
    kind, sizes = "llama tied" if tied else "llama", LAYOUTS[layout]
    _save_pretrained(build(kind), tmp_path)
    runs = run_on_ranks(_trained_presharded, sizes, str(tmp_path), world_size=math.prod(sizes.values()), timeout=180)
    assert_like(runs, plain(kind), weights=4e-12)


def _other_sizes(folder: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2))
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    accelerator.prepare(AutoModelForCausalLM.from_pretrained(folder, distributed_config=config))


@pytest.mark.soak
def test_a_model_split_over_other_ranks_is_refused(tmp_path: Path) -> None:
    _save_pretrained(build("llama"), tmp_path)
    for text in errors_on_ranks(ConfigError, _other_sizes, str(tmp_path), num_errors=2):
        assert "is already split over the ranks [0, 1], but the tp axis of this run has none" in text
        assert "pass ParallelismConfig(tp_size=2)" in text


def _refused(kind: str) -> None:
    models = {
        "kv heads": lambda: tiny_llama(num_kv_heads=1),
        "no plan": lambda: tiny_gpt(),
        "unmatched": lambda: tiny_gpt(),
        "odd": lambda: tiny_gpt(),
        "style": lambda: tiny_gpt(),
        "packed": lambda: tiny_gpt(),
        "tied": lambda: tiny_gpt(tied=True),
    }
    plans: dict[str, dict[str, Any]] = {
        "unmatched": {"blocks.*.mlp.upp": "colwise"},
        "odd": {"odd": "colwise"},
        "style": {"head": "columnwise"},
        "packed": {"head": "packed_colwise"},
        "tied": {"embedding": "embedding_colwise", "head": "colwise_gather_output"},
    }
    model = models[kind]()
    if kind == "odd":
        model.odd = nn.Linear(4, 3)
    accelerator_on({"tp_size": 2}, plans.get(kind)).prepare(model)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("kv heads", ["LlamaForCausalLM has num_key_value_heads=1, which cannot be split over tp_size=2 ranks"]),
        ("no plan", ["TinyGPT has no plan for tensor parallelism", "TorchTensorParallelConfig(plan={"]),
        (
            "unmatched",
            ["the pattern 'blocks.*.mlp.upp' of the plan matches no module of TinyGPT", "blocks.*.attention.k"],
        ),
        ("odd", ["odd has out_features=3, which cannot be split over tp_size=2 ranks", "'odd': 'replicate'"]),
        ("style", ["head has the style 'columnwise'", "colwise_gather_output"]),
        ("packed", ["head has the style 'packed_colwise'", "several projections are packed in one weight"]),
        ("tied", ["embedding and head share one weight, but the plan splits it along different dimensions"]),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(kind: str, parts: list[str]) -> None:
    for text in errors_on_ranks(ConfigError, _refused, kind, num_errors=2):
        assert [part for part in parts if part not in text] == []


class _Regions(nn.Module):
    """Dropout of a whole activation, of a split one, and of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.up, self.down = nn.Linear(4, 64, bias=False), nn.Linear(64, 4, bias=False)
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._drop(self.down(self._drop(self.up(self._drop(x)) + 1)))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(torch.ones_like(x))
        self.masks.append(dropped.detach())
        return x * dropped


def _masks(seed_by_rank: bool) -> list[list[list[float]]]:
    accelerator = accelerator_on({"tp_size": 2}, {"up": "colwise", "down": "rowwise"})
    torch.manual_seed(3)
    model = _Regions()
    torch.manual_seed(accelerator.process_index if seed_by_rank else 3)
    prepared = accelerator.prepare(model)
    for _ in range(2):
        prepared(torch.ones(16, 4))
    return [mask.tolist() for mask in model.masks]


@pytest.mark.parametrize("seed_by_rank", [False, True])
def test_masks_are_equal_where_activations_are_and_differ_between_parts(seed_by_rank: bool) -> None:
    first, second = run_on_ranks(_masks, seed_by_rank)
    assert [mine == theirs for mine, theirs in zip(first, second)] == [True, False, True] * 2
    assert first[:3] != first[3:]
    assert first[1] != first[4]


def _padded() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Embedding(8, 4, padding_idx=2), nn.Linear(4, 4)).double()
    plain_model = copy.deepcopy(model)
    prepared = accelerator_on({"tp_size": 2}, {"0": "embedding_rowwise"}).prepare(model)
    tokens = torch.tensor([[2, 6, 1, 5, 2]])
    for one in (prepared, plain_model):
        one(tokens).square().sum().backward()
    return whole(prepared[0].weight.grad), plain_model[0].weight.grad


def test_the_padding_row_of_a_split_embedding_gets_no_gradient_and_the_others_keep_theirs() -> None:
    """Row 6 is row 2 of the second rank's part."""
    for found, expected in run_on_ranks(_padded):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
        assert found[2].abs().max() == 0
        assert found[6].abs().max() > 0


def _overflow(sizes: dict[str, int], rank: int) -> tuple[bool, bool]:
    """Overflow in one element of a split layer's gradient on one rank; return whether the step was skipped, and weights are as before."""
    from echelon.utils import GradScalerKwargs

    scaler = GradScalerKwargs(init_scale=8.0)
    plan = {name: style for name, style in GPT_PLAN.items() if name != "embedding"}  # the first parameter is whole
    accelerator = accelerator_on(sizes, plan, mixed_precision="fp16", kwargs_handlers=[scaler])
    accelerator.gradient_accumulation_steps = 1
    model: Any = tiny_gpt(dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: whole(value) for name, value in model.named_parameters()}
    batch = ragged_batches(1)[0]
    accelerator.backward(mean_loss(model, batch), num_items=num_tokens(batch["labels"]))
    if accelerator.process_index == rank:
        model.blocks[1].mlp.up.weight.grad.to_local()[0, 0] = math.inf
    optimizer.step()
    skipped = accelerator.optimizer_step_was_skipped
    after = {name: whole(value) for name, value in model.named_parameters()}
    return skipped, all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("layout", "rank"),
    [("tp 2", 1), *(pytest.param("shard 2 x tp 2", rank, marks=pytest.mark.soak) for rank in (0, 1, 3))],
)
def test_an_overflow_in_one_rank_s_part_skips_the_step_on_all_ranks(layout: str, rank: int) -> None:
    sizes = LAYOUTS[layout]
    answers = run_on_ranks(_overflow, sizes, rank, world_size=math.prod(sizes.values()))
    assert answers == [(True, True)] * len(answers)


# ---- weights in files -------------------------------------------------------------------------------------------------


def _exported(folder: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))
    model = accelerator.prepare(tiny_llama(tied=True))
    accelerator.save_model(model, folder)
    return {}


@pytest.mark.slow
def test_the_export_is_what_one_process_writes(tmp_path: Path) -> None:
    run_on_ranks(_exported, str(tmp_path / "ranks"), world_size=4)
    model = tiny_llama(tied=True)
    Accelerator(cpu=True).save_model(model, tmp_path / "one")
    found, expected = (load_file(tmp_path / where / "model.safetensors") for where in ("ranks", "one"))
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in expected.items()}


def _filled_from_files(folder: str) -> tuple[dict[str, Any], int]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))
    with torch.device("meta"):
        model = tiny_llama()
    model = accelerator.prepare(model)
    load_checkpoint_in_model(model, folder)
    held = sum(p.to_local().numel() for name, p in model.named_parameters() if "proj" in name)
    return accelerator.get_state_dict(model) or {}, held


@pytest.mark.slow
def test_weights_go_from_files_into_the_parts(tmp_path: Path) -> None:
    model = tiny_llama()
    Accelerator(cpu=True).save_model(model, tmp_path)
    answers = run_on_ranks(_filled_from_files, str(tmp_path), world_size=4)
    assert largest_difference(answers[0][0], dict(model.state_dict()), relative=False) == 0
    whole = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    assert [held for _, held in answers] == [whole // 4] * 4
