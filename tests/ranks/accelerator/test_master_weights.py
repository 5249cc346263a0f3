"""Models loaded in bf16: what trains their weights, and in which dtype they are saved."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from echelon import Accelerator, ParallelismConfig
from echelon.base.errors import ConfigError
from echelon.utils import TorchTensorParallelConfig
from tests.harness import errors_on_ranks, run_on_ranks
from tests.parallel_models import tiny_llama
from tests.prepared_loop import all_warnings, marked_line, weights_of, whole
from tests.reference import saved_weights

pytestmark = pytest.mark.slow  # 25 s; tests/unit/accelerator/test_master_weights.py is quick

NUM_STEPS, LR = 200, 1e-5
X = torch.arange(4 * 8 * 6.0).reshape(4, 8, 6).sin()  # 4 batches of 8 samples, used in turn
LAYOUTS = [
    (1, "single"),
    (1, "ddp"),
    (1, "zero1"),
    (1, "fsdp2"),
    (2, "ddp"),
    (2, "zero1"),
    (2, "fsdp2"),
    (2, "tp"),
]


class Mlp(nn.Module):
    """Layers near 1, whose updates by 1e-5 bf16 cannot hold; one is frozen, and one weight is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.base.requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.again = nn.Linear(6, 6)
        self.again.bias = self.norm.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.down(self.up(self.norm(self.base(x))).relu()))  # type: ignore[no-any-return]


def mlp() -> Any:
    torch.manual_seed(0)
    model = Mlp()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return model.bfloat16()


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - 3).square().mean()


@lru_cache(maxsize=1)
def by_hand() -> dict[str, torch.Tensor]:
    """Return float32 weights that train beside a bf16 model, which computes by autocast, in plain PyTorch."""
    model = mlp()
    masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(masters.values(), lr=LR)
    for k in range(NUM_STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # a tied weight is replaced in both places
            outputs = torch.func.functional_call(model, masters, (X[k % 4],))
        loss_of(outputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in masters.items()}


def accelerator_of(engine: str, **settings: Any) -> Accelerator:
    if engine == "tp":
        handler = TorchTensorParallelConfig(plan={"up": "colwise", "down": "rowwise"})
        settings["parallelism_config"] = ParallelismConfig(tp_size=2, tp_handler=handler)
    else:
        settings["engine"] = engine
    return Accelerator(cpu=True, **{"mixed_precision": "bf16", **settings})


def part_of(engine: str, k: int) -> torch.Tensor:
    """Return this rank's samples of a step."""
    return X[k % 4] if engine == "tp" else X[k % 4].chunk(dist.get_world_size())[dist.get_rank()]


def prepared(engine: str, **settings: Any) -> tuple[Accelerator, Any, Any, list[tuple[str, str]]]:
    """Return an Accelerator, the model, its optimizer, and the warnings, each with its line."""
    accelerator = accelerator_of(engine, **settings)
    model = mlp()
    with all_warnings() as caught:
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        model, optimizer = accelerator.prepare(model, optimizer)  # STEP
    told = [
        (str(one.message), f"{Path(one.filename).name}:{one.lineno}")
        for one in caught
        if one.category.__name__ == "EchelonWarning"
    ]
    return accelerator, model, optimizer, told


def train(accelerator: Accelerator, model: Any, optimizer: Any, engine: str, steps: range) -> None:
    for k in steps:
        accelerator.backward(loss_of(model(part_of(engine, k))))
        optimizer.step()
        optimizer.zero_grad()


def named_weights(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    names = [name for name, _ in accelerator.unwrap_model(model).named_parameters()]
    return dict(zip(names, weights_of(accelerator, model), strict=True))


# ---- float32 ---------------------------------------------------------------------------------------------------------


def _train_and_save(engine: str, folder: str) -> tuple[dict[str, torch.Tensor], list[tuple[str, str]], list[str]]:
    accelerator, model, optimizer, told = prepared(engine)
    train(accelerator, model, optimizer, engine, range(NUM_STEPS))
    accelerator.save_model(model, folder)
    state = {str(value.dtype) for entries in optimizer.state.values() for value in entries.values() if value.dim()}
    return named_weights(accelerator, model), told, sorted(state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_updates_are_those_of_a_float32_loop_and_files_have_the_loaded_dtype(
    layout: tuple[int, str], tmp_path: Path
) -> None:
    world_size, engine = layout
    (found, told, state), *others = run_on_ranks(_train_and_save, engine, str(tmp_path), world_size=world_size)
    ((text, line),) = told
    assert text.startswith("7 trained parameters of Mlp are bfloat16")
    assert line == marked_line(__file__)
    assert all(not warned for _, warned, _ in others)
    assert state in (["torch.float32"], [])  # a rank of zero1 may own nothing
    saved, loaded = load_file(tmp_path / "model.safetensors"), dict(mlp().named_parameters())
    assert {name: value.dtype for name, value in saved.items()} == dict.fromkeys(loaded, torch.bfloat16)
    for name, wanted in by_hand().items():
        assert found[name].dtype == torch.float32
        # The path is up to 200 x 1e-5 long, and bf16 would have lost all of it (its spacing near 1 is 8e-3). Ranks round the bf16
        # gradients of half a batch: AdamW turns that into a small part of each step.
        assert (wanted - loaded[name].float()).abs().max() > 1e-3
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-4)
        assert torch.equal(saved[name], found[name].bfloat16())
    for name in ("base.weight", "base.bias"):
        assert torch.equal(saved[name], loaded[name])
        assert found[name].dtype == torch.bfloat16


def _resume(engine: str, folder: str, first: int) -> dict[str, torch.Tensor]:
    accelerator, model, optimizer, _ = prepared(engine)
    if first:
        accelerator.load_state(folder)
    train(accelerator, model, optimizer, engine, range(first, 6 if first else 3))
    if not first:
        accelerator.save_state(folder)
        train(accelerator, model, optimizer, engine, range(3, 6))
    return named_weights(accelerator, model)


@pytest.mark.parametrize("form", ["echelon", "accelerate"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_checkpoint_holds_the_float32_weights(
    engine: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_CHECKPOINT_FORMAT", form)
    folder = str(tmp_path / "saved")
    whole_run = run_on_ranks(_resume, engine, folder, 0, world_size=2)[0]
    resumed = run_on_ranks(_resume, engine, folder, 3, world_size=2)[0]
    assert all(torch.equal(resumed[name], value) for name, value in whole_run.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in whole_run.values())


def _load_rounded(folder: str) -> list[str]:
    accelerator, model, optimizer, _ = prepared("ddp")
    train(accelerator, model, optimizer, "ddp", range(2))
    accelerator.save_state(folder)
    told = []
    for mode in ("keep", "float32"):
        other, *_ = prepared("ddp", master_weights=mode)
        with all_warnings() as caught:
            other.load_state(folder)
        told.append([str(one.message) for one in caught])
    return [*map(str, told[0]), str(told[1])]


def test_a_run_in_another_dtype_is_told_that_it_rounds(tmp_path: Path) -> None:
    text, exact = run_on_ranks(_load_rounded, str(tmp_path / "saved"), world_size=2)[0]
    assert "holds float32 values of 8 tensors that are torch.bfloat16 in this run" in text
    assert exact == "[]"


def _save_by_hand(engine: str) -> Any:
    accelerator, model, optimizer, _ = prepared(engine)
    train(accelerator, model, optimizer, engine, range(2))
    states = (accelerator.get_state_dict(model), accelerator.get_state_dict(model, master_weights=True))
    return [
        None
        if one is None
        else {name: (str(v.dtype), v.data_ptr() == one["norm.bias"].data_ptr()) for name, v in one.items()}
        for one in states
    ]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_state_dict_keeps_ties_and_has_the_loaded_dtype_unless_told_otherwise(engine: str) -> None:
    rounded, masters = run_on_ranks(_save_by_hand, engine, world_size=2)[0]
    assert {dtype for dtype, _ in rounded.values()} == {"torch.bfloat16"}
    for state in (rounded, masters):
        assert [name for name, (_, is_tied) in state.items() if is_tied] == ["norm.bias", "again.bias"]
    assert {name for name, (dtype, _) in masters.items() if dtype == "torch.bfloat16"} == {"base.weight", "base.bias"}


def _save_stages(folder: str) -> list[str]:
    accelerator = Accelerator(
        cpu=True,
        parity="exact",
        mixed_precision="bf16",
        master_weights="float32",
        parallelism_config=ParallelismConfig(pp_size=2),
    )
    model = tiny_llama(dtype=torch.bfloat16)
    model.model.embed_tokens.requires_grad_(False)
    pipeline = accelerator.prepare_pipeline(
        model, num_micro_batches=2, loss_fn=lambda logits, _: logits.mean(), count_items=lambda _: 1.0
    )
    accelerator.save_model(pipeline.model, folder)
    return sorted({str(p.dtype) for p in pipeline.model.parameters()})


def test_a_pipeline_saves_the_loaded_dtype_of_all_stages(tmp_path: Path) -> None:
    first, second = run_on_ranks(_save_stages, str(tmp_path), world_size=2)
    assert (first, second) == (["torch.bfloat16", "torch.float32"], ["torch.float32"])
    saved = saved_weights(tmp_path)
    assert {str(value.dtype) for value in saved.values()} == {"torch.bfloat16"}
    assert saved.keys() >= {"model.embed_tokens.weight", "lm_head.weight"}


def _prepare_split() -> list[str]:
    """Prepare a model whose layers are already DTensors, as transformers loads them with a tp_plan."""
    from torch.distributed.tensor import Shard, distribute_tensor

    accelerator = accelerator_of("tp")
    model = nn.Linear(4, 4, bias=False).bfloat16()
    mesh = accelerator.torch_device_mesh["tp"]
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.prepare(model, optimizer)
    (held,) = optimizer.param_groups[0]["params"]
    return [str(held.dtype), str(held.to_local().dtype), str(whole(held).dtype), str(held is model.weight)]


def test_weights_that_are_already_split_are_cast_inside() -> None:
    found = run_on_ranks(_prepare_split, world_size=2)
    assert found == [["torch.float32"] * 3 + ["True"]] * 2


# ---- keep, no mixed precision ----------------------------------------------------------------------------------------


def _train_as_they_are(engine: str, settings: dict[str, Any]) -> Any:
    accelerator, model, optimizer, told = prepared(engine, **settings)
    before = named_weights(accelerator, model)
    if settings.get("mixed_precision") != "no":
        train(accelerator, model, optimizer, engine, range(3))
    after = named_weights(accelerator, model)
    return told, [str(one.dtype) for one in after.values()], all(torch.equal(after[n], v) for n, v in before.items())


@pytest.mark.parametrize("layout", [(1, "single"), (2, "ddp"), (2, "zero1"), (2, "fsdp2"), (2, "tp")])
def test_weights_that_are_kept_in_bf16_are_told_once_at_the_line(layout: tuple[int, str]) -> None:
    first, *others = run_on_ranks(_train_as_they_are, layout[1], {"master_weights": "keep"}, world_size=layout[0])
    (told,), dtypes, is_lost = first
    assert told[0].startswith("mixed_precision='bf16', but 7 of 7 trained parameters are bfloat16 themselves")
    assert told[1] == marked_line(__file__)
    assert set(dtypes) == {"torch.bfloat16"}
    assert is_lost
    assert all(not one[0] for one in others)


@pytest.mark.parametrize("settings", [{}, {"master_weights": "keep"}])
def test_without_mixed_precision_a_bf16_model_is_left_alone(settings: dict[str, str]) -> None:
    found = run_on_ranks(_train_as_they_are, "ddp", {"mixed_precision": "no", **settings}, world_size=2)
    assert [(told, set(dtypes)) for told, dtypes, _ in found] == [([], {"torch.bfloat16"})] * 2


def test_float32_weights_without_mixed_precision_are_refused() -> None:
    settings = {"mixed_precision": "no", "master_weights": "float32"}
    for text in errors_on_ranks(ConfigError, _train_as_they_are, "ddp", settings, world_size=2, num_errors=2):
        assert "7 trained parameters of Mlp (norm.weight, ...) are torch.bfloat16" in text
        assert "set mixed_precision='bf16', or call model.float()" in text


# ---- stochastic ------------------------------------------------------------------------------------------------------


def _round_stochastically(engine: str, settings: dict[str, Any]) -> torch.Tensor:
    torchao = pytest.importorskip("torchao.optim")
    accelerator = accelerator_of(engine, master_weights="stochastic", seed=3, **settings)
    model: Any = mlp()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.requires_grad_()
    optimizer: Any = torchao.AdamW8bit(model.parameters(), lr=1e-4, weight_decay=0.0, bf16_stochastic_round=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(dist.get_rank())  # as for different dropout masks
    with torch.compiler.set_stance("force_eager"):
        for k in range(10):
            accelerator.backward(model(part_of(engine, k)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([one.flatten() for one in weights_of(accelerator, model)])


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_ranks_round_copies_of_a_weight_alike(engine: str) -> None:
    first, second = run_on_ranks(_round_stochastically, engine, {}, world_size=2)
    assert torch.equal(first, second)
    assert first.dtype == torch.bfloat16
    assert set(first.tolist()) >= {1.0, 1 - 2**-8}


@pytest.mark.parametrize(
    ("engine", "settings", "text"),
    [
        ("tp", {}, "the ranks of the axes tp have parts of different sizes"),
        ("fsdp2", {"parity": "exact"}, "the updates would depend on the number of ranks, but parity='exact'"),
    ],
)
def test_layouts_whose_ranks_would_round_differently_are_refused(
    engine: str, settings: dict[str, Any], text: str
) -> None:
    for error in errors_on_ranks(ConfigError, _round_stochastically, engine, settings, world_size=2, num_errors=2):
        assert text in error
