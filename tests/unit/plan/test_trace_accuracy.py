"""Traced peaks of many models against storages counted by their finalizers in a real step on the CPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from echelon.plan.facts import StepSettings
from echelon.precision.policy import PrecisionPolicy
from tests.unit.plan.test_trace import measured, predicted

B, S = 4, 64
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 500,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PLAIN = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
VISION: dict[str, Any] = {**PLAIN, "image_size": 32, "patch_size": 8, "num_labels": 10}
VISION.pop("vocab_size")
PAIR: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 500,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _tokens() -> torch.Tensor:
    return torch.randint(5, 500, (B, S))


def _text(name: str, kind: str, *, padded: bool = False, **config: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of transformers by its class and the class of its config, and a batch of text."""
    batch = {"input_ids": _tokens(), "labels": _tokens()}
    if padded:
        batch["attention_mask"] = (torch.arange(S) < S - 9).long().repeat(B, 1)
    return getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**config)), batch


def _image(name: str, size: int = 32, **config: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = getattr(transformers, f"{name}ForImageClassification")(getattr(transformers, f"{name}Config")(**config))
    return model, {"pixel_values": torch.randn(B, 3, size, size), "labels": torch.randint(0, 10, (B,))}


def _clip() -> tuple[nn.Module, dict[str, Any]]:
    text = {**PLAIN, "eos_token_id": 2, "bos_token_id": 1}
    vision = {name: value for name, value in VISION.items() if name != "num_labels"}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    batch = {"input_ids": _tokens(), "pixel_values": torch.randn(B, 3, 32, 32), "return_loss": True}
    return transformers.CLIPModel(config), batch


def _whisper() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.WhisperConfig(**PAIR, max_source_positions=50, num_mel_bins=20)
    batch = {"input_features": torch.randn(B, 20, 100), "labels": _tokens()}
    return transformers.WhisperForConditionalGeneration(config), batch


class _Own(nn.Module):
    """A model of this file: ``run`` is its forward pass."""

    def __init__(self, parts: dict[str, nn.Module], run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def _mlp() -> tuple[nn.Module, dict[str, Any]]:
    first = (nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1))
    model = nn.Sequential(*first, nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    return model, {"x": torch.randn(64, 32), "y": torch.randint(0, 10, (64,))}


def _sequence(body: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = own.body(own.embed(x))
        return own.head(hidden[0] if isinstance(hidden, tuple) else hidden).flatten(0, 1)

    parts = {"embed": nn.Embedding(500, 64), "body": body, "head": nn.Linear(64, 500)}
    return _Own(parts, run), {"x": _tokens(), "y": _tokens().flatten()}


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    def level(inside: int, outside: int) -> nn.Module:
        first = (nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU())
        return nn.Sequential(*first, nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU())

    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        first = own.down(x)
        inner = nn.functional.interpolate(own.middle(nn.functional.max_pool2d(first, 2)), scale_factor=2)
        return own.head(own.up(torch.cat([inner, first], 1))).mean((2, 3))

    parts = {"down": level(3, 16), "middle": level(16, 32), "up": level(48, 16), "head": nn.Conv2d(16, 10, 1)}
    return _Own(parts, run), {"x": torch.randn(B, 3, 32, 32), "y": torch.randint(0, 10, (B,))}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": lambda: _text("Llama", "LlamaForCausalLM", **SMALL),
    "qwen2": lambda: _text("Qwen2", "Qwen2ForCausalLM", padded=True, **SMALL),
    "qwen3": lambda: _text("Qwen3", "Qwen3ForCausalLM", **SMALL, head_dim=16),
    "gemma2": lambda: _text("Gemma2", "Gemma2ForCausalLM", **SMALL, head_dim=16),
    "gemma3": lambda: _text("Gemma3Text", "Gemma3ForCausalLM", **SMALL, head_dim=16),
    "mistral": lambda: _text("Mistral", "MistralForCausalLM", **SMALL, sliding_window=32),
    "phi": lambda: _text("Phi", "PhiForCausalLM", **PLAIN),
    "gpt2": lambda: _text("GPT2", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, vocab_size=500, n_positions=S),
    "gpt_neox": lambda: _text("GPTNeoX", "GPTNeoXForCausalLM", **PLAIN),
    "bloom": lambda: _text(
        "Bloom", "BloomForCausalLM", padded=True, hidden_size=64, n_layer=2, n_head=4, vocab_size=500
    ),
    "opt": lambda: _text("OPT", "OPTForCausalLM", padded=True, **PLAIN, ffn_dim=128, word_embed_proj_dim=64),
    "bert": lambda: _text("Bert", "BertForMaskedLM", padded=True, **PLAIN),
    "distilbert": lambda: _text(
        "DistilBert", "DistilBertForMaskedLM", dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=500
    ),
    "t5": lambda: _text(
        *("T5", "T5ForConditionalGeneration"),
        d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=500,
        decoder_start_token_id=0,
    ),
    "bart": lambda: _text("Bart", "BartForConditionalGeneration", **PAIR),
    "mixtral": lambda: _text("Mixtral", "MixtralForCausalLM", **SMALL, num_local_experts=4),
    "qwen3_moe": lambda: _text(
        *("Qwen3Moe", "Qwen3MoeForCausalLM"),
        **{**SMALL, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "mamba": lambda: _text(
        "Mamba", "MambaForCausalLM", hidden_size=64, num_hidden_layers=2, vocab_size=500, state_size=8
    ),
    "vit": lambda: _image("ViT", **VISION),
    "resnet": lambda: _image(
        "ResNet", embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 2, 1, 1], num_labels=10
    ),
    "convnext": lambda: _image(
        "ConvNext", 64, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1], num_labels=10
    ),
    "swin": lambda: _image(
        "Swin", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10
    ),
    "clip": _clip,
    "whisper": _whisper,
    "mlp": _mlp,
    "lstm": lambda: _sequence(nn.LSTM(64, 64, 2, batch_first=True)),
    "encoder": lambda: _sequence(nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)),
    "unet": _unet,
}  # fmt: skip


def _loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    if "y" in batch:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    return model(**batch).loss


def _error(name: str, mixed_precision: str = "no") -> float:
    """Return by which part the predicted peak of a step is above the counted one."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    expected = predicted(model, optimizer, _loss, batch, StepSettings(B, mixed_precision))
    PrecisionPolicy(mode=mixed_precision, device_type="cpu").wrap_forward(model)
    found = measured(model, optimizer, _loss, batch)
    return max(expected.values()) / max(found.values()) - 1


@pytest.mark.parametrize("name", ["mlp", "lstm", "llama"])
def test_the_peak_is_within_three_percent(name: str) -> None:
    # oneDNN pads the weights of convolutions by a few values, and torch does not say how large its workspaces for recurrent layers are.
    assert -0.03 <= _error(name) <= 0.03


@pytest.mark.parametrize(
    "mixed_precision", [pytest.param("no", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.soak)]
)
def test_the_peaks_of_28_models(mixed_precision: str) -> None:
    # oneDNN has no LSTM in bf16 on every CPU.
    names = [name for name in MODELS if mixed_precision == "no" or name != "lstm"]
    errors = {name: _error(name, mixed_precision) for name in names}
    print("\n".join(f"{name} {100 * error:+.2f} %" for name, error in errors.items()))
    sizes = sorted(map(abs, errors.values()))
    assert len(sizes) >= 25
    assert statistics.median(sizes) <= 0.03
    assert sizes[int(0.95 * len(sizes))] <= 0.08
    assert min(errors.values()) >= -0.03, errors
