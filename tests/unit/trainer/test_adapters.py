"""The Trainer with models whose own files hold only a part of what is trained (PEFT), against a plain loop that never stops."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from echelon.base.errors import CheckpointError
from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer
from tests.trainer_models import CONSTANT_SGD, EndsAfter, arguments, warnings_of

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*belong to no adapter:echelon.base.warnings.EchelonWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

SEED, N, SIZE, END = 3, 32, 4, 4
NUM_STEPS = N // SIZE
Builder = Callable[[], nn.Module]
WEIGHTS = "echelon_weights.safetensors"


@pytest.fixture(autouse=True)
def variable_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' ``save_pretrained`` imports accelerate and, where it is installed, deepspeed, which sets this variable."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class Net(nn.Module):
    """Two layers around a normalization, in float64."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.first, self.norm, self.second = nn.Linear(4, 8), norm(8), nn.Linear(8, 1)
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.second(self.norm(self.first(x)).relu()).squeeze(-1)
        return {"logits": y} if labels is None else {"loss": F.mse_loss(y, labels), "logits": y}


def _lora(**options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["first"], init_lora_weights=False, **options)


def _adapted(norm: type[nn.Module] = nn.LayerNorm, *, name: str = "default") -> Any:
    model = Net(norm)
    torch.manual_seed(SEED + 1)
    return peft.get_peft_model(model, _lora(), adapter_name=name)


def _beside_default() -> Any:
    model = _adapted()
    model.add_adapter("mine", _lora())
    model.set_adapter("mine")
    return model


def _with_trained_norm() -> Any:
    model = _adapted(name="mine")
    model.base_model.model.norm.requires_grad_(True)
    return model


def _language_model() -> Any:
    torch.manual_seed(SEED)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes)).double()


def _with_own_adapters() -> Any:
    """A model of transformers with adapters but without peft's wrapper."""
    model = _language_model()
    for name in ("one", "two"):
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), adapter_name=name)
    model.set_adapter("two")
    return model


def _with_prompt_encoder() -> Any:
    model = _language_model()
    torch.manual_seed(SEED + 1)
    kind = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "encoder_hidden_size": 8}
    return peft.get_peft_model(model, peft.PromptEncoderConfig(**kind)).double()


BUILDERS: dict[str, Builder] = {
    "default": _adapted,
    "a named adapter": lambda: _adapted(name="mine"),
    "two adapters": _beside_default,
    "a trained norm": _with_trained_norm,
    "running statistics": lambda: _adapted(nn.BatchNorm1d),
    "transformers' add_adapter": _with_own_adapters,
    "a prompt encoder": _with_prompt_encoder,
}


def _rows(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if hasattr(model, "config") and hasattr(model, "generate"):
        ids = [torch.randint(3, 16, (5,), generator=generator) for _ in range(N)]
        return [{"input_ids": one, "labels": one.clone()} for one in ids]
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    return [{"x": one[:4], "labels": one[4]} for one in x]


def _trainer(folder: Path, model: nn.Module, *, end: int | None = None, **options: Any) -> Trainer:
    options = {"per_device_train_batch_size": SIZE, "seed": SEED, "train_sampling_strategy": "sequential"} | options
    args = arguments(folder, **CONSTANT_SGD, **options)
    rows = _rows(model)
    evaluated = {"eval_dataset": rows} if "eval_strategy" in options else {}
    return Trainer(model, args, train_dataset=rows, callbacks=[EndsAfter(end)], **evaluated)


def _train_plainly(model: nn.Module, num_steps: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    rows, trained = _rows(model), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=CONSTANT_SGD["learning_rate"])
    model.train()
    for start in range(0, num_steps * SIZE, SIZE):
        batch = {name: torch.stack([row[name] for row in rows[start : start + SIZE]]) for name in rows[0]}
        if (
            "input_ids" in batch
        ):  # as transformers counts: the labels but the first, although a prompt predicts that, too
            batch["num_items_in_batch"] = torch.tensor(batch["labels"][:, 1:].numel())
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _require_close(found: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    """float64: only the order of additions differs."""
    state = found.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ["echelon", "transformers"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_resumed_training_matches_the_plain_loop(tmp_path: Path, kind: str, layout: str) -> None:
    build = BUILDERS[kind]
    _trainer(tmp_path, build(), end=END, checkpoint_format=layout).train()
    again = _trainer(tmp_path, build(), checkpoint_format=layout)
    again.train(resume_from_checkpoint=True)
    _require_close(again.model, _train_plainly(build()))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", BUILDERS)
def test_the_best_model_is_loaded_whole(tmp_path: Path, kind: str) -> None:
    model = BUILDERS[kind]()
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    trainer = _trainer(tmp_path, model, load_best_model_at_end=True, save_only_model=True, **options)
    trainer.evaluate = lambda *_, **__: {"eval_loss": abs(trainer.state.global_step - 4)}  # type: ignore[method-assign]
    trainer.train()
    _require_close(trainer.model, _train_plainly(BUILDERS[kind](), 4))


@pytest.mark.parametrize("kind", ["default", "a named adapter", "two adapters", "a prompt encoder"])
def test_files_of_transformers_resume_every_adapter(tmp_path: Path, kind: str) -> None:
    """transformers writes no file for what lies outside of the adapters; with two adapters, one is in a subfolder."""
    build = BUILDERS[kind]
    _trainer(tmp_path, build(), end=END, checkpoint_format="transformers").train()
    if kind != "a prompt encoder":  # whose file holds what the encoder computes, but not its weights
        (tmp_path / f"checkpoint-{END}" / WEIGHTS).unlink()
    again = _trainer(tmp_path, build(), checkpoint_format="transformers")
    again.train(resume_from_checkpoint=True)
    _require_close(again.model, _train_plainly(build()))


@pytest.mark.parametrize("has_file", [True, False])
def test_other_adapters_are_rejected(tmp_path: Path, has_file: bool) -> None:
    _trainer(tmp_path, _adapted(), end=END, checkpoint_format="transformers").train()
    if not has_file:
        (tmp_path / f"checkpoint-{END}" / WEIGHTS).unlink()
    reason = r"missing .*\.mine\." if has_file else "holds the adapters default, but the model has default, mine"
    with pytest.raises(CheckpointError, match=reason) as error:
        _trainer(tmp_path, _beside_default()).train(resume_from_checkpoint=True)
    assert "give the model the same adapters" in str(error.value)


def test_the_base_model_is_not_stored_but_all_that_was_trained(tmp_path: Path) -> None:
    """A weight that is frozen again was trained before; the weights of a quantized layer are buffers that never change."""
    model = _with_trained_norm()
    packed = nn.Module()
    packed.register_buffer("qweight", torch.ones(2, 2, dtype=torch.int32))
    packed.register_buffer("scales", torch.ones(2))
    model.base_model.model.packed = packed
    model.base_model.model.is_quantized = True
    trainer = _trainer(tmp_path, model, end=END)
    trainer.create_optimizer()
    model.base_model.model.norm.requires_grad_(False)
    trainer.train()
    stored = load_file(tmp_path / f"checkpoint-{END}" / WEIGHTS)
    prefix = "base_model.model."
    layers = [f"{prefix}first.lora_{one}.mine.weight" for one in "AB"]
    assert sorted(stored) == [*layers, f"{prefix}norm.bias", f"{prefix}norm.weight"]


def test_one_warning_names_what_the_adapter_files_lack(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _with_trained_norm(), save_strategy="steps", save_steps=2)
    found = [*warnings_of(trainer.train), *warnings_of(lambda: trainer.save_model(str(tmp_path / "final")))]
    assert len(found) == 1
    assert found[0].startswith("base_model.model.norm.weight, base_model.model.norm.bias can change in training")
    assert "modules_to_save" in found[0]


def test_modules_to_save_need_no_warning(tmp_path: Path) -> None:
    model = peft.get_peft_model(Net(), _lora(modules_to_save=["norm"]), adapter_name="mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error", EchelonWarning)
        _trainer(tmp_path, model, end=END).train()
    stored = load_file(tmp_path / f"checkpoint-{END}" / "mine" / "adapter_model.safetensors")
    assert "base_model.model.norm.weight" in stored


class MergesWhenSaving(Trainer):
    """A user's Trainer whose model files are of no use for resuming."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        Path(output_dir, "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")


@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_resuming_does_not_depend_on_an_overridden_save_model(tmp_path: Path, layout: str) -> None:
    args = arguments(tmp_path, **CONSTANT_SGD, per_device_train_batch_size=SIZE, checkpoint_format=layout)
    args.train_sampling_strategy = "sequential"
    for end, resume in ((END, None), (None, True)):
        model = _beside_default()
        trainer = MergesWhenSaving(model, args, train_dataset=_rows(model), callbacks=[EndsAfter(end)])
        trainer.train(resume_from_checkpoint=resume)
    _require_close(trainer.model, _train_plainly(_beside_default()))


class WithHead(Net):
    """No model of transformers, but with a ``save_pretrained`` that writes files of its own, and the head apart."""

    def save_pretrained(self, folder: str, **options: Any) -> None:
        torch.save(self.first.state_dict(), Path(folder, "pytorch_model.bin"))


@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_a_model_with_its_own_save_pretrained_is_stored_by_name(tmp_path: Path, layout: str) -> None:
    _trainer(tmp_path, WithHead(), end=END, checkpoint_format=layout).train()
    stored = load_file(tmp_path / f"checkpoint-{END}" / "model.safetensors")
    assert stored.keys() == WithHead().state_dict().keys()
    again = _trainer(tmp_path, WithHead(), checkpoint_format=layout)
    again.train(resume_from_checkpoint=True)
    _require_close(again.model, _train_plainly(WithHead()))


class WithNamesOfItsPart(nn.Module):
    """A model with a head, whose state dict has the names of the model inside, as that of trl's value head."""

    def __init__(self, *, leaves_out: bool = False) -> None:
        super().__init__()
        self.inner, self.leaves_out = Net(), leaves_out

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.inner(x, labels)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = self.inner.state_dict()
        return {name: value for name, value in state.items() if not (self.leaves_out and "first" in name)}

    def save_pretrained(self, folder: str, **options: Any) -> None:
        torch.save(self.state_dict(), Path(folder, "pytorch_model.bin"))


@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_a_state_dict_with_other_names_is_loaded(tmp_path: Path, layout: str) -> None:
    _trainer(tmp_path, WithNamesOfItsPart(), end=END, checkpoint_format=layout).train()
    again = _trainer(tmp_path, WithNamesOfItsPart(), checkpoint_format=layout)
    nn.init.zeros_(again.model.inner.first.weight)
    again.train(resume_from_checkpoint=True)
    _require_close(again.model, _train_plainly(WithNamesOfItsPart()))


@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_one_warning_names_weights_that_the_state_dict_leaves_out(tmp_path: Path, layout: str) -> None:
    model = WithNamesOfItsPart(leaves_out=True)
    trainer = _trainer(tmp_path, model, save_strategy="steps", save_steps=2, checkpoint_format=layout)
    found = warnings_of(trainer.train)
    assert len(found) == 1
    start = "inner.first.weight, inner.first.bias are trained, but WithNamesOfItsPart.state_dict() does not return them"
    assert found[0].startswith(start)
