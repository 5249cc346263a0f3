"""parity="bitwise": bit-identical weights on any number of processes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from echelon.base import environ
from echelon.base.errors import ConfigError, UsageError
from echelon.base.sharded import is_dtensor
from echelon.base.warnings import EchelonWarning
from echelon.engines.fsdp.fsdp2 import FSDP2Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.world.world import World
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import weights_of
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain
from tests.reference import mean_square

STEPS = 20
BATCH = 24  # shards of 3; 5 * 24 + 5 samples: the last update of a pass has empty shards


class _CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 6, 3)
        self.norm = nn.GroupNorm(2, 6)
        self.out = nn.Linear(6 * 6 * 6, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.convolution(x.view(-1, 1, 8, 8))).relu()
        out: torch.Tensor = self.out(self.dropout(hidden.flatten(1)))
        return out


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 16)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        )
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.blocks(self.inside(x.view(-1, 8, 8))).mean(1))
        return out


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))


class _GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=32,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (4 * x).round().long().remainder(32)
        out: torch.Tensor = self.model(tokens[:, :24]).logits[:, -1, :4].clone()  # FSDP2 warns about views
        return out


MODELS: dict[str, Any] = {"mlp": _mlp, "cnn": _CNN, "transformer": _Transformer, "gpt2": _GPT2}
# Modules that are separate sharding units.
UNITS = {"mlp": ["Linear"], "cnn": ["Conv2d"], "transformer": ["TransformerEncoderLayer"], "gpt2": ["GPT2Block"]}


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(5 * BATCH + 5, 64, generator=generator), torch.randint(4, (5 * BATCH + 5,), generator=generator)
    )


def _accelerator(kind: str, layout: str | None, **options: Any) -> Accelerator:
    """Return one of the engine ``layout``; of fsdp2 with the stage of ZeRO."""
    if layout is None or not layout.startswith("fsdp2"):
        return Accelerator(parity="bitwise", engine=layout, seed=3, **options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout == "fsdp2 stage 3",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=UNITS[kind],
    )
    return Accelerator(parity="bitwise", engine="fsdp2", fsdp_plugin=plugin, seed=3, **options)


def _run(kind: str, layout: str | None) -> tuple[list[Any], list[float], list[float]]:
    """Return weights, losses and norms after 20 updates."""
    torch.manual_seed(0)
    model: Any = MODELS[kind]()
    accelerator = _accelerator(kind, layout)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(_data(), batch_size=BATCH, shuffle=True)
    )
    losses, norms = [], []
    while accelerator.progress.step < STEPS:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(accelerator.update_loss())
    return weights_of(accelerator, model), losses, norms


Layouts = list[tuple[int, str]]
QUICK: dict[str, Layouts] = {
    "mlp": [(2, "ddp"), (3, "fsdp2 stage 3"), (1, "fsdp2 stage 3"), (2, "fsdp2 stage 2")],
    "cnn": [(3, "zero1")],
    "transformer": [(4, "ddp")],
}
ALL: Layouts = [(n, "ddp") for n in (1, 2, 3, 4, 6, 8)]
ALL += [(n, engine) for engine in ("zero1", "fsdp2 stage 3", "fsdp2 stage 2") for n in (1, 2, 3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        *QUICK.items(),
        *(pytest.param(kind, ALL, marks=pytest.mark.soak, id=f"{kind}-all") for kind in MODELS),
    ],
)
def test_weights_losses_and_norms_are_bit_identical_on_any_number_of_processes(kind: str, layouts: Layouts) -> None:
    ((weights, losses, norms),) = run_on_ranks(_run, kind, None, world_size=1)
    assert len(set(losses)) >= STEPS  # the weights change
    assert max(norms) > 0.5  # clipping did something
    for world_size, layout in layouts:
        for other, other_losses, other_norms in run_on_ranks(_run, kind, layout, world_size=world_size, timeout=600):
            assert all(map(torch.equal, weights, other)), (world_size, layout)
            assert (other_losses, other_norms) == (losses, norms), (world_size, layout)
        print(f"{kind}, {layout} on {world_size}: equal to the last bit")


DRAWN = Program(num_samples=29, batch_size=12, order="shuffle", optimizer="momentum", evaluates="epoch")
"""Its last update has fewer samples than shards."""


def test_updates_are_those_of_a_plain_loop_with_the_same_bits() -> None:
    programs = [
        replace(DRAWN, clears_first=True),
        replace(DRAWN, loss="items"),
        replace(DRAWN, accumulates=False),
        replace(DRAWN, loss="two"),  # losses of one micro-step are summed
        replace(DRAWN, data="iterable", order="sequential", dispatches=False),
        replace(DRAWN, data="iterable", order="sequential", dispatches=True),
    ]
    layouts = [
        Layout(world_size=n, parity="bitwise", engine=e, shards=8) for n, e in ((2, "ddp"), (3, "fsdp2 stage 3"))
    ]
    cases = [Case(program=program, layout=layouts[0], other=layouts[1]) for program in programs]
    shards = {"parity": "bitwise", "shards": 2}  # one for each process
    cases.append(Case(program=programs[1], layout=Layout(**shards), other=Layout(world_size=2, **shards)))
    require_plain(cases)


class _Sometimes(nn.Module):
    """One layer is used by some of the shards, and one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(64, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.always(x)
        return out + self.sometimes(x) if x[0, 0] > 0.5 else out


def _partly_used(layout: str | None, clears: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = _Sometimes()
    accelerator = Accelerator(parity="bitwise", engine=layout, seed=3)
    # Weight decay would change a layer whose gradient is zero instead of None.
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(), batch_size=BATCH))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    return weights_of(accelerator, model)


@pytest.mark.slow
@pytest.mark.parametrize("clears", [True, False])
def test_partly_used_and_unused_parameters_are_bit_identical(clears: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    begun = list(_Sometimes().parameters())
    (expected,) = run_on_ranks(_partly_used, None, clears, world_size=1)
    assert [torch.equal(p, q) for p, q in zip(expected, begun)] == [False, False, False, False, True, True]
    for world_size, layout in [(2, "ddp"), (3, "fsdp2")]:
        for found in run_on_ranks(_partly_used, layout, clears, world_size=world_size):
            assert all(map(torch.equal, found, expected)), (world_size, layout)
    assert "8 shards of 3 samples, 3 on each of 3 processes (89 % utilization)" in capsys.readouterr().out


def _padded(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of real positions, and samples padded to the longest one in the batch."""
    return torch.tensor([n for n, _ in samples]), nn.utils.rnn.pad_sequence([x for _, x in samples], batch_first=True)


def _of_padded_batches() -> tuple[list[int], list[torch.Tensor]]:
    accelerator = Accelerator(
        parity="bitwise",
        canonical_shards=4,
        seed=1,
        cpu=True,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=True),
    )
    generator = torch.Generator().manual_seed(3)
    data: Any = [(n, torch.randn(n, 3, generator=generator)) for n in (2, 9, 4, 17, 3, 5, 31, 8, 2, 6, 11, 7)]
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.3)
    nn.init.constant_(model.bias, 0.1)
    loader = DataLoader(data, batch_size=4, collate_fn=_padded)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    widths = set()
    for counts, x in loader:
        widths.add(x.shape[1])
        is_real = torch.arange(x.shape[1])[None, :] < counts[:, None]
        loss = ((model(x)[..., 0] - x.sum(-1)).square() * is_real).sum() / is_real.sum()
        accelerator.backward(loss, num_items=int(is_real.sum()))
        optimizer.step()
        optimizer.zero_grad()
    return sorted(widths), weights_of(accelerator, model)


def test_collated_batches_do_not_depend_on_the_number_of_processes() -> None:
    """Padding changes the lengths of sums, so rank zero collates whole batches, even on one process."""
    (_, expected), *_ = found = [run_on_ranks(_of_padded_batches, world_size=n)[0] for n in (1, 2, 3)]
    for widths, weights in found:
        assert widths == [11, 17, 31]  # the longest sample of each global batch
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def _part(folder: str, kind: str, number: int, last: int, layout: str | None) -> list[torch.Tensor]:
    """Resume from the checkpoint before ``number`` in the middle of an epoch, train 3 updates, and save."""
    torch.manual_seed(0)
    accelerator = _accelerator(kind, layout)
    model: Any = MODELS[kind]()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(_data(), batch_size=BATCH, shuffle=True)
    )
    if number:
        with warnings.catch_warnings():  # each shard has its own RNG, so the warning does not apply
            warnings.filterwarnings("ignore", ".*RNG states for", EchelonWarning)
            accelerator.load_state(f"{folder}/{number - 1}")
    stop = 3 * (number + 1) if number < last else 12
    while accelerator.progress.step < stop:
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.progress.step == stop:
                accelerator.save_state(f"{folder}/{number}")
                break
    return weights_of(accelerator, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        pytest.param("mlp", [None, "fsdp2 stage 3", "ddp", "zero1"], id="every engine"),
        *(
            pytest.param(kind, [layout if layout != "ddp" else None, *[layout] * 3], marks=pytest.mark.soak)
            for kind in MODELS
            for layout in ("ddp", "zero1", "fsdp2 stage 3")
        ),
    ],
)
def test_the_number_of_processes_may_change_in_mid_epoch(kind: str, layouts: list[str | None], tmp_path: Path) -> None:
    (expected,) = run_on_ranks(_part, str(tmp_path / "whole"), kind, 0, 0, None, world_size=1)
    for number, (world_size, layout) in enumerate(zip([1, 4, 3, 2], layouts)):
        found = run_on_ranks(
            _part, str(tmp_path / "parts"), kind, number, 3, layout, world_size=world_size, timeout=300
        )
    assert all(torch.equal(p, q) for one in found for p, q in zip(one, expected))


def _prepared(model: nn.Module, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(parity="bitwise", seed=3, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer, DataLoader(_data(), batch_size=BATCH)))


def _turns() -> None:
    accelerator, model, optimizer, loader = _prepared(_mlp(), canonical_shards=2)
    for x, y in loader:
        for _ in range(2):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()


def _outside() -> None:
    accelerator, model, *_ = _prepared(_mlp())
    accelerator.backward(model(torch.ones(3, 64)).sum())


def _norms_that_train_later() -> None:
    _, model, _, loader = _prepared(nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4)).eval())
    model.train()
    next(iter(loader))


def _fractions() -> None:
    accelerator, model, _, loader = _prepared(_mlp())
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y), num_items=2.5)


def _other_threads() -> None:
    with environ.patch({"OMP_NUM_THREADS": str(dist.get_rank() + 1)}):
        _prepared(_mlp())


def _fused() -> None:
    model = _mlp()
    accelerator = Accelerator(parity="bitwise", engine="fsdp2", seed=3)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))


def _groups_of_ranks() -> None:
    FSDP2Engine(World.current(), options=ShardingOptions(replicas=2)).build_sharded_update(8, list)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (_turns, UsageError, "was computed after an optimizer's step"),
    (_outside, UsageError, "outside a prepared DataLoader's loop"),
    (_norms_that_train_later, UsageError, "1 (BatchNorm1d): a BatchNorm in training mode"),
    (_fractions, UsageError, "num_items=2.5 is not an integer"),
    (_other_threads, ConfigError, "threads is 1 on rank 0 but 2 on rank 1"),
    (_fused, UsageError, "AdamW(fused=True) rounds differently"),
    (_groups_of_ranks, UsageError, "does not support 2 replicas"),
    (
        partial(_prepared, nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4))),
        UsageError,
        "1 (BatchNorm1d): a BatchNorm in training",
    ),
    (
        partial(_prepared, _mlp(), canonical_shards=1),
        ConfigError,
        "canonical_shards=1 is less than the number of processes (2)",
    ),
    (partial(_prepared, _mlp(), max_micro_batch_size=2), ConfigError, "set canonical_shards=12"),
    (
        partial(_prepared, _mlp(), kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")]),
        ConfigError,
        "DDP sends no gradients with parity='bitwise'",
    ),
]


@pytest.mark.parametrize(("run", "kind", "text"), REFUSED)
def test_settings_that_break_bit_equality_are_rejected(run: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(run, world_size=2)
    assert all(isinstance(error, kind) for error in caught.value.errors.values()), caught.value
    assert text in str(caught.value)


def _threads() -> int:
    torch.set_num_threads(2)
    _prepared(_mlp())
    return torch.get_num_threads()


def test_the_number_of_threads_comes_from_the_environment() -> None:
    assert run_on_ranks(_threads, world_size=2) == [1, 1]  # OMP_NUM_THREADS of the ranks of tests


def _loss_of_a_dropped_update(folder: str) -> tuple[float, float]:
    """Return ``update_loss()`` after an update, and after loading a checkpoint, which drops it."""
    accelerator, model, optimizer, loader = _prepared(_mlp())
    accelerator.save_state(folder)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients:
            break
    trained = accelerator.update_loss()
    accelerator.load_state(folder)
    return trained, accelerator.update_loss()


def test_the_loss_of_the_last_update_is_known_after_it_was_dropped(tmp_path: Path) -> None:
    for trained, loaded in run_on_ranks(_loss_of_a_dropped_update, str(tmp_path / "saved"), world_size=2):
        assert loaded == trained > 0


def _uncleared(layout: str, num_samples: int) -> list[torch.Tensor]:
    """Return the weights after updates without zero_grad, for two optimizers with alternating layers."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))).double()
    parameters = list(model.parameters())
    optimizers: list[Any] = [torch.optim.SGD(parameters[i::2], lr=0.1) for i in range(2)]
    accelerator = _accelerator("mlp", layout)
    data = DataLoader(TensorDataset(torch.eye(4, dtype=torch.float64).repeat(num_samples // 4, 1)), batch_size=4)
    model, *optimizers, data = accelerator.prepare(model, *optimizers, data)  # type: ignore[assignment]
    for (x,) in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            for optimizer in optimizers:
                optimizer.step()
    return weights_of(accelerator, model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_uncleared_gradients_stay_with_their_parameters(world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))).double()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        mean_square(plain(torch.eye(4, dtype=torch.float64))).backward()
        sgd.step()
    for found in run_on_ranks(_uncleared, "fsdp2 stage 2", 12, world_size=world_size):
        # sums of a few float64 numbers in another order
        torch.testing.assert_close(found, [p.detach() for p in plain.parameters()], rtol=1e-12, atol=1e-15)


def _linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4, bias=False)).double()


def _two_models(first: list[str], last: list[str]) -> list[torch.Tensor]:
    """Return the weights of a trained model and the gradients of another one, which the loop never clears.

    Args:
        first: the models of each backward pass in the first micro-step of an update.
        last: the same in the last one.
    """
    accelerator = _accelerator("mlp", "fsdp2 stage 3", canonical_shards=4)
    models = dict(zip(("model", "other"), accelerator.prepare(_linear(0), _linear(1))))
    optimizer: Any = accelerator.prepare(torch.optim.SGD(models["model"].parameters(), lr=0.1))
    data = torch.eye(4, dtype=torch.float64).repeat(3, 1)
    for number, (x,) in enumerate(accelerator.prepare(DataLoader(TensorDataset(data), batch_size=4))):
        with accelerator.accumulate(*models.values()):
            for name in last if number % 2 else first:
                accelerator.backward(mean_square(models[name](x)))
            optimizer.step()
            optimizer.zero_grad()
    (kept,) = (p.grad for p in models["other"].parameters())
    assert is_dtensor(kept)
    return [*weights_of(accelerator, models["model"]), kept.full_tensor()]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (["model", "other"], ["model"]),
        (["model", "other"], ["model", "model"]),
        (["model"], ["model", "other"]),
        (["model", "other"], ["other", "model"]),
        (["other"], ["model"]),
    ],
)
def test_a_backward_pass_need_not_reach_all_sharded_models(first: list[str], last: list[str]) -> None:
    models = {"model": _linear(0), "other": _linear(1)}
    x = torch.eye(4, dtype=torch.float64)
    sgd = torch.optim.SGD(models["model"].parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        for sample in range(4):  # rank 0 has the shards 0 and 1, rank 1 has 2 and 3
            for name in last if sample % 2 else first:
                (mean_square(models[name](x[sample : sample + 1])) / 4).backward()
        sgd.step()
    expected = [p.detach() for p in models["model"].parameters()] + [p.grad for p in models["other"].parameters()]
    for found in run_on_ranks(_two_models, first, last, world_size=2):
        # sums of a few float64 numbers in another order
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def _clears_between_losses(engine: str, *, detaches: bool) -> list[torch.Tensor]:
    """Return the weights of two models of which one gets a gradient of the other's loss, unless it is detached."""
    accelerator = _accelerator("mlp", engine, canonical_shards=4)
    first, second = accelerator.prepare(_linear(0), _linear(1))
    optimizers: Any = accelerator.prepare(*(torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)))
    data = torch.eye(4, dtype=torch.float64).repeat(3, 1)
    for (x,) in accelerator.prepare(DataLoader(TensorDataset(data), batch_size=4)):
        with accelerator.accumulate(first, second):
            _train_pair(first, second, x, optimizers, accelerator.backward, detaches=detaches)
    return [*weights_of(accelerator, first), *weights_of(accelerator, second)]


def _train_pair(first: Any, second: Any, x: torch.Tensor, optimizers: Any, backward: Any, *, detaches: bool) -> None:
    made = first(x)
    optimizers[1].zero_grad()
    backward(mean_square(second(made.detach() if detaches else made)))
    optimizers[0].zero_grad()
    backward(mean_square(second(first(x))))
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2 stage 3"])
def test_gradients_of_the_first_of_two_losses_cannot_be_cleared(engine: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_clears_between_losses, engine, detaches=False, world_size=2)
    for error in failed.value.errors.values():
        assert isinstance(error, UsageError)
        assert "zero_grad() between two losses of a batch" in str(error)
        assert "detach what the first loss need not reach" in str(error)
    plain, x = [_linear(0), _linear(1)], torch.eye(4, dtype=torch.float64)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    for _ in range(3):
        _train_pair(*plain, x, optimizers, lambda loss: loss.backward(), detaches=True)
    expected = [p.detach() for model in plain for p in model.parameters()]
    for found in run_on_ranks(_clears_between_losses, engine, detaches=True, world_size=2):
        # sums of a few float64 numbers in another order
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
