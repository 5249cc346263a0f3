"""QLoRA with the Trainer: a 4-bit base model, adapters of peft; one process, two, and sharded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import Trainer, TrainingArguments
from echelon.base.errors import UsageError
from tests.harness import run_on_ranks

pytestmark = pytest.mark.slow  # imports transformers and peft on every rank


def _base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=16, **sizes))


def _quantized(folder: str, storage: torch.dtype = torch.uint8) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)


def _adapted(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads is_gradient_checkpointing
        return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def _data() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 64, (48, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _train(base: str, folder: str, sharded: bool, resume: bool) -> list[float]:
    from torch import distributed as dist

    size = dist.get_world_size() if dist.is_initialized() else 1
    sharding = {"fsdp": "full_shard", "fsdp_config": {"version": 2}} if sharded else {}
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=8 // size,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **sharding,
    )
    model = _adapted(_quantized(base, torch.float32 if sharded else torch.uint8))
    trainer = Trainer(model, args, train_dataset=_data())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
    trainer.save_model(f"{folder}/adapter")
    trainer.end()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _by_hand(folder: str) -> tuple[list[float], torch.Tensor]:
    """Return the losses of a plain PyTorch loop with the Trainer's order of samples, and the trained model's logits."""
    from torch.utils.data import DataLoader, RandomSampler

    _base().save_pretrained(folder)
    model = _adapted(_quantized(folder))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=6)
    order = RandomSampler(_data(), generator=torch.Generator().manual_seed(42))
    losses = []
    model.train()
    for batch in DataLoader(_data(), batch_size=8, sampler=order):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _logits(model)


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(16)[None]).logits


def _loaded(base: str, adapter: str) -> list[torch.Tensor]:
    """Return the logits of the saved adapter on the quantized base model, and merged into the weights of that model."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = PeftModel.from_pretrained(_quantized(base), adapter)
        merged = PeftModel.from_pretrained(_quantized(base).dequantize(), adapter).merge_and_unload()
    return [_logits(loaded), _logits(merged)]


def test_qlora_is_trained_saved_loaded_and_merged(tmp_path: Path) -> None:
    """Losses within 1e-6 of a plain loop on one process: two ranks sum gradients in another order."""
    pytest.importorskip("bitsandbytes")
    base = str(tmp_path / "base")
    expected, logits = run_on_ranks(_by_hand, base, world_size=1)[0]
    for world_size, sharded in ((1, False), (2, False), (2, True)):
        folder = str(tmp_path / f"{world_size}-{sharded}")
        losses = run_on_ranks(_train, base, folder, sharded, False, world_size=world_size)[0]
        assert losses == pytest.approx(expected, abs=1e-6)
        assert run_on_ranks(_train, base, folder, sharded, True, world_size=world_size)[0] == losses
        for loaded in run_on_ranks(_loaded, base, f"{folder}/adapter", world_size=1)[0]:
            assert torch.allclose(loaded, logits, atol=1e-4)  # six steps of Adam from gradients that differ by 1e-7


def _train_without_adapters(folder: str) -> None:
    _base().save_pretrained(f"{folder}/base")
    args = TrainingArguments(f"{folder}/run", report_to="none", use_cpu=True)
    trainer = Trainer(_quantized(f"{folder}/base"), args, train_dataset=_data())
    with pytest.raises(UsageError, match="quantized weights, which cannot be trained, and no adapters"):
        trainer.train()


def test_a_quantized_model_without_adapters_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run_on_ranks(_train_without_adapters, str(tmp_path), world_size=1)
