"""Optimizers by their names: their arguments, and the weights that they decay."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from echelon.base.errors import ConfigError, MissingExtraError
from echelon.trainer import (
    Trainer,
    TrainingArguments,
)
from echelon.trainer.optim.adafactor import Adafactor
from echelon.trainer.optim.optimizers import decay_parameter_names, optimizer_class_and_arguments, parameter_groups
from tests.trainer_models import DATA, Line, arguments as _args


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.plain = nn.LayerNorm(2)  # by its type, whatever its name
        self.input_norm = nn.BatchNorm1d(2)  # by its name
        self.norm = nn.Linear(2, 2)
        self.normal = nn.Linear(2, 2)  # no norm
        self.RMSNorm = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)


def test_weights_decay_and_biases_and_norms_do_not() -> None:
    model = Block()
    names = decay_parameter_names(model)
    assert names == ["frozen", "linear.weight", "normal.weight"]
    decaying, others = parameter_groups(model, decaying=names, weight_decay=0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decaying["params"]] == [id(model.linear.weight), id(model.normal.weight)]
    assert len(others["params"]) == 11 - 2


@pytest.mark.parametrize(
    ("name", "kind", "arguments"),
    [
        ("adamw_torch", torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
        ("adamw_torch_fused", torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True}),
        ("sgd", torch.optim.SGD, {"lr": 0.1}),
        ("adagrad", torch.optim.Adagrad, {"lr": 0.1}),
        ("rmsprop", torch.optim.RMSprop, {"lr": 0.1}),
        ("adafactor", Adafactor, {"lr": 0.1, "scale_parameter": False, "relative_step": False}),
    ],
)
def test_optimizers_by_name(name: str, kind: type, arguments: dict[str, Any]) -> None:
    args = TrainingArguments(optim=name, learning_rate=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)
    assert optimizer_class_and_arguments(args) == (kind, arguments)
    kind([nn.Parameter(torch.zeros(1))], **arguments)


def test_more_arguments_of_the_optimizer_are_read_from_text() -> None:
    args = TrainingArguments(optim="sgd", optim_args="momentum=0.9, nesterov=True, betas=(0.5, 0.6), mode=fast")
    assert optimizer_class_and_arguments(args)[1] == {
        "lr": 5e-5,
        "momentum": 0.9,
        "nesterov": True,
        "betas": (0.5, 0.6),
        "mode": "fast",
    }


def test_eight_bit_adam_is_that_of_torchao() -> None:
    pytest.importorskip("torchao.optim")
    args = TrainingArguments(optim="adamw_torch_8bit", optim_args="block_size=128", learning_rate=0.1)
    kind, given = optimizer_class_and_arguments(args)
    optimizer = kind(Line().parameters(), **given)  # its step needs a compiler
    assert (kind.__name__, optimizer.block_size, optimizer.defaults["eps"]) == ("AdamW8bit", 128, 1e-8)


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return type(name, (), {})


@pytest.mark.parametrize(
    ("name", "package", "kind", "arguments"),
    [
        ("paged_adamw_8bit", "bitsandbytes", "AdamW", {"betas": (0.8, 0.9), "eps": 1e-8, "optim_bits": 8, "is_paged": True}),
        ("lion_32bit", "bitsandbytes", "Lion", {"betas": (0.8, 0.9), "optim_bits": 32, "is_paged": False}),
        ("rmsprop_bnb_8bit", "bitsandbytes", "RMSprop", {"optim_bits": 8}),
        ("schedule_free_sgd", "schedulefree", "SGDScheduleFree", {"weight_decay": 0.0, "warmup_steps": 3, "r": 0.0, "weight_lr_power": 2.0}),
        ("stable_adamw", "optimi", "StableAdamW", {"betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0, "decouple_lr": False, "max_lr": None, "kahan_sum": None}),
        ("grokadamw", "grokadamw", "GrokAdamW", {"alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1, "gradient_clipping": 1.0}),
    ],
)  # fmt: skip
def test_an_optimizer_of_another_package_gets_its_arguments(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, kind: str, arguments: dict[str, Any]
) -> None:
    args = TrainingArguments(optim=name, learning_rate=0.5, adam_beta1=0.8, adam_beta2=0.9, warmup_steps=3)
    with monkeypatch.context() as without:
        for module in (package, f"{package}.optim"):
            without.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=r'pip install "[a-z-]+>='):
            optimizer_class_and_arguments(args)
    for module in (package, "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, module, _Package(module))
    found, given = optimizer_class_and_arguments(args)
    assert (found.__name__, given) == (kind, {"lr": 0.5, **arguments})


def test_a_low_rank_optimizer_gets_the_layers_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "galore_torch", _Package("galore_torch"))
    model = nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})

    def targets(wanted: Any) -> list[str]:
        args = TrainingArguments(optim="galore_adamw", optim_target_modules=wanted, optim_args="rank=4")
        kind, given = optimizer_class_and_arguments(args, model)
        others, low = given["params"]
        assert (kind.__name__, low["rank"], low["update_proj_gap"]) == ("GaLoreAdamW", 4, 200)
        assert len(others["params"]) + len(low["params"]) == 6
        return [name for name, p in model.named_parameters() if any(p is target for target in low["params"])]

    assert targets("all-linear") == ["attn.weight", "mlp.weight"]
    assert targets(["attn"]) == ["attn.weight"]
    assert targets(r"m.*") == ["mlp.weight"]
    with pytest.raises(ConfigError, match="does not match any linear layer; the model has attn, mlp"):
        targets(["conv"])
    with pytest.raises(ConfigError, match="requires optim_target_modules"):
        targets(None)


def test_an_optimizer_with_two_sets_of_weights_is_told_what_comes(tmp_path: Path) -> None:
    told: list[str] = []

    class TwoSets(torch.optim.SGD):
        def train(self) -> None:
            told.append("train")

        def eval(self) -> None:
            told.append("eval")

    args = _args(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    model = Line()
    Trainer(model, args, train_dataset=DATA, eval_dataset=DATA, optimizers=(TwoSets(model.parameters()), None)).train()
    assert told == ["train", "eval"]  # back to "train" only when a step follows
