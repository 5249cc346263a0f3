"""Unmodified tutorial loops with a DeepSpeed config, on the engines deepspeed and fsdp2; and LoRA."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.base import environ
from echelon.base.warnings import EchelonWarning
from echelon.utils import DeepSpeedPlugin, tqdm
from tests.harness import run_on_ranks

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytestmark = pytest.mark.deepspeed

# What the launcher exports for `distributed_type: DEEPSPEED` with stage 3, both offloads to the CPU, and the rest of an
# ordinary yaml.
EXPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
}


@contextmanager
def _as_libraries_warn() -> Iterator[None]:
    """Ignore the libraries' warnings about each other (DeepSpeed reads deprecated attributes of transformers)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", EchelonWarning)  # settings without a counterpart in fsdp2 have a separate test
        yield


def _config() -> Any:
    from transformers import GPT2Config

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, **dropout)


def _tokens() -> torch.Tensor:
    """Return ascending sequences, which are easy to learn."""
    starts = torch.randint(0, 48, (32, 1), generator=torch.Generator().manual_seed(0))
    return starts + torch.arange(16)


def _tutorial(engine: str, folder: Path) -> tuple[list[float], str, bool, float | None]:
    """Train a GPT-2 like tutorials; return the losses, and the error of a new model with the saved weights."""
    from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

    with environ.patch({**EXPORTED, "ECHELON_ENGINE": engine}), _as_libraries_warn():
        accelerator = Accelerator()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_config())
        made_in_shards = any(hasattr(p, "ds_id") for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader: Any = torch.utils.data.DataLoader(_tokens(), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        epochs = 4
        schedule = get_cosine_schedule_with_warmup(optimizer, 2, len(loader) * epochs)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        losses = []
        for _ in range(epochs):
            model.train()
            total = torch.zeros(())
            for batch in tqdm(loader, disable=True):
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                total += accelerator.reduce(loss.detach(), "mean")
            losses.append(total.item() / len(loader))
        accelerator.wait_for_everyone()
        state = accelerator.get_state_dict(model)
        accelerator.save(state, folder / "model.pt")
        model.eval()
        with torch.no_grad():
            mine = model(input_ids=_tokens()).logits
        off = None
        if accelerator.is_main_process:
            fresh = AutoModelForCausalLM.from_config(_config()) if engine == "fsdp2" else _fresh(accelerator)
            fresh.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
            with torch.no_grad():
                off = float((fresh.eval()(input_ids=_tokens()).logits - mine).abs().max())
        return losses, str(accelerator.distributed_type), made_in_shards, off


def _fresh(accelerator: Accelerator) -> Any:
    """Create a whole model on one rank, although transformers creates sharded models."""
    from transformers import AutoModelForCausalLM

    assert accelerator.deepspeed_plugin is not None
    with accelerator.deepspeed_plugin.zero3_init_context_manager(enable=False):
        return AutoModelForCausalLM.from_config(_config())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.soak)])
def test_a_gpt2_trains_under_an_ordinary_yaml(engine: str, tmp_path: Path) -> None:
    results = run_on_ranks(_tutorial, engine, tmp_path, world_size=2, timeout=120)
    kind = {"deepspeed": "DEEPSPEED", "fsdp2": "FSDP"}[engine]
    for losses, distributed_type, made_in_shards, _ in results:
        assert losses[-1] < 0.8 * losses[0]
        assert distributed_type == f"DistributedType.{kind}"
        assert made_in_shards == (engine == "deepspeed")
    assert results[0][3] is not None
    assert results[0][3] < 1e-4  # the same numbers, gathered layer by layer


def _lora(kind: str, folder: Path) -> tuple[list[str], list[float], list[str]]:
    """Train a LoRA model, save only the adapter, and load it into a new model; return its names and the losses."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from transformers import GPT2LMHeadModel

    plugins: dict[str, dict[str, Any]] = {
        "ddp": {},
        "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        "zero3": {
            "deepspeed_plugin": DeepSpeedPlugin(
                hf_ds_config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
                zero3_init_flag=False,
            )
        },
    }

    def fresh() -> Any:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(_config())
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(model, config)

    def loss(model: Any) -> float:
        model.eval()
        with torch.no_grad():
            value = float(model(input_ids=_tokens(), labels=_tokens()).loss)
        model.train()
        return value

    with _as_libraries_warn():
        accelerator = Accelerator(**plugins[kind])
        model = fresh()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        loader: Any = torch.utils.data.DataLoader(_tokens(), batch_size=4)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seen = [loss(model)]
        for batch in loader:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss(model))
        unwrapped = accelerator.unwrap_model(model)
        state = accelerator.get_state_dict(model)
        names = []
        if accelerator.is_main_process:
            adapter = get_peft_model_state_dict(unwrapped, state_dict=state)
            names = sorted(adapter)
            torch.save(adapter, folder / "adapter.pt")
        accelerator.wait_for_everyone()
        adapter = torch.load(folder / "adapter.pt", weights_only=True)
        accelerator.free_memory()
        again = fresh()
        set_peft_model_state_dict(again, adapter)
        seen.append(loss(again))  # not prepared
        last = fresh()
        trained = torch.optim.AdamW([p for p in last.parameters() if p.requires_grad])
        last, _ = accelerator.prepare(last, trained)
        result = set_peft_model_state_dict(accelerator.unwrap_model(last), adapter)  # prepared
        seen.append(loss(last))
        return names, seen, list(result.unexpected_keys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero3"])
def test_only_the_adapter_of_a_lora_model_is_saved_and_it_reloads(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    results = run_on_ranks(_lora, kind, tmp_path, world_size=2, timeout=120)
    layers = [
        f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_{part}.weight" for layer in (0, 1) for part in "AB"
    ]
    assert results[0][0] == layers
    for _, (before, after, loaded, loaded_prepared), unexpected in results:
        assert after < before - 0.01
        assert loaded == pytest.approx(after, rel=1e-5)
        assert loaded_prepared == pytest.approx(after, rel=1e-5)
        assert unexpected == []
