"""The step that a plan is for: of a script, or of a model of transformers that exists only as a configuration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import is_available
from echelon.plan.devices import find_device
from echelon.plan.empty_model import library_named, read_config, trainable
from echelon.plan.facts import ModelFacts, ParallelLayout, ParameterFacts, StepSettings, StepTrace
from echelon.plan.trace import trace_step
from echelon.plan.verdict import StepSource, Variant

_DTYPES = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32})
_OPTIMIZERS: MappingProxyType[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = MappingProxyType(
    {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step, what it is in words, how it would run by default, and other ways to build its model."""

    title: str
    source: StepSource
    layout: ParallelLayout
    """The script's engine, settings and accumulation; only sizes of axes are missing."""
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """What a step of a model of transformers depends on."""

    path: str
    sequence: int
    lora: int = 0
    """Rank of adapters of all linear layers; 0: none, all weights are trained."""
    load: str = ""
    """``4bit``, ``bf16``, ``fp16`` or ``fp32``; empty: the dtype in the configuration."""
    optimizer: str = "adamw"


class ModelStep:
    """The step of a model that is built from its configuration, with tokens of the same length and no padding."""

    can_chunk_loss = False

    def __init__(self, choice: ModelChoice) -> None:
        self.choice = choice
        self._config = read_config(choice.path)
        if self._config.pad_token_id is None:
            self._config.pad_token_id = 0
        self._config.use_cache = False  # as in a Trainer
        self._facts: ModelFacts | None = None
        self._traced: dict[StepSettings, StepTrace] = {}

    @property
    def model(self) -> ModelFacts:
        """The model's facts, which a trace gives."""
        if self._facts is None:
            self.trace(StepSettings(micro_batch=1))
        assert self._facts is not None
        return self._facts

    def trace(self, settings: StepSettings) -> StepTrace:
        """Trace one step, once for the same settings."""
        if settings not in self._traced:
            self._traced[settings] = self._trace(settings)
        return self._traced[settings]

    def _trace(self, settings: StepSettings) -> StepTrace:
        module, linear = self._built
        facts, trace = trace_step(
            module, _OPTIMIZERS[self.choice.optimizer], _loss, self._batch(settings.micro_batch), settings
        )
        if self.choice.load == "4bit":
            facts, trace = _with_4bit_weights(facts, trace, linear)
        self._facts = facts
        return trace

    @cached_property
    def _built(self) -> tuple[nn.Module, frozenset[str]]:
        """Return the model on the meta device, and the names of the weights that can be quantized."""
        is_4bit = self.choice.load == "4bit"
        module: Any = trainable(self._config, dtype=torch.bfloat16 if is_4bit else _DTYPES.get(self.choice.load))
        linear = frozenset(
            f"{name}.weight"
            for name, one in module.named_modules()
            if isinstance(one, nn.Linear) and one is not module.get_output_embeddings()
        )
        if self.choice.lora:
            peft = library_named("peft")
            with torch.device("meta"), warnings.catch_warnings():
                # peft reads an attribute that transformers deprecates, which the user cannot change.
                warnings.simplefilter("ignore", FutureWarning)
                module = peft.get_peft_model(module, peft.LoraConfig(r=self.choice.lora, target_modules="all-linear"))
        return module, linear

    def _batch(self, size: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros((size, self.choice.sequence), dtype=torch.int64)
        is_classifier = (self._config.architectures or [""])[0].endswith("ForSequenceClassification")
        labels = torch.zeros(size, dtype=torch.int64) if is_classifier else tokens.clone()
        return {"input_ids": tokens, "labels": labels}

    def title(self, settings: StepSettings) -> str:
        """Return what the step is, in words."""
        self.trace(settings)
        sizes = [(math.prod(p.tensor.shape), p.is_trainable) for p in self.model.parameters]
        total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
        name = (self._config.architectures or [self.model.class_name])[0]
        parts = [
            _("{name}: {total} parameters, {trained} trained", name=name, total=_count(total), trained=_count(trained)),
            *([f"LoRA r={self.choice.lora}"] if self.choice.lora else []),
            *([_("4-bit weights")] if self.choice.load == "4bit" else []),
            _OPTIMIZERS[self.choice.optimizer].__name__,
            _("mixed precision {mode}", mode=settings.mixed_precision),
            _("samples of {sequence} tokens", sequence=self.choice.sequence),
        ]
        return ", ".join(parts)


def model_step(choice: ModelChoice, settings: StepSettings) -> PlannedStep:
    """Return the step of a model of transformers, and what would make it smaller: LoRA, 4-bit weights, half of the sequence.

    Raises:
        ConfigError: transformers cannot load the configuration.
    """
    step = ModelStep(choice)
    return PlannedStep(
        title=step.title(settings),
        source=step,
        layout=ParallelLayout(engine="single", settings=settings),
        variants=tuple(_variants(choice)),
    )


def usual_precision(device: str) -> str:
    """Return the autocast dtype that people use on a device: bf16, or fp16 if the device does not compute bf16."""
    return "bf16" if not device or "bfloat16" in find_device(device).flops else "fp16"


def parse_lora(text: str | None) -> int:
    """Return the rank in ``r=16``; 0 for None.

    Raises:
        UsageError: ``text`` is not of this form.
    """
    if text is None:
        return 0
    name, _equals, rank = text.rpartition("=")
    if name not in ("", "r") or not rank.isdigit() or rank == "0":
        raise UsageError(
            _("{text!r} is not the size of adapters", text=text),
            where="--lora",
            do=_("pass a number, such as --lora r=16"),
        )
    return int(rank)


def _variants(choice: ModelChoice) -> Iterable[Variant]:
    smaller = []
    has_peft = is_available("peft")
    if has_peft and not choice.lora:
        smaller.append((_("train adapters (LoRA) instead of all weights"), "--lora r=16", replace(choice, lora=16)))
    if has_peft and choice.load != "4bit":
        text = _("train adapters (LoRA) on 4-bit weights") if not choice.lora else _("load 4-bit weights")
        arguments = "--load 4bit" if choice.lora else "--lora r=16 --load 4bit"
        smaller.append((text, arguments, replace(choice, lora=choice.lora or 16, load="4bit")))
    if choice.sequence >= 256:
        half = choice.sequence // 2
        smaller.append((_("samples of {half} tokens", half=half), f"--seq {half}", replace(choice, sequence=half)))
    for text, arguments, other in smaller:
        yield Variant(text=text, arguments=arguments, build=lambda other=other: ModelStep(other))  # type: ignore[misc]


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _with_4bit_weights(facts: ModelFacts, trace: StepTrace, linear: Collection[str]) -> tuple[ModelFacts, StepTrace]:
    """Return the facts as if bitsandbytes had quantized the weights of linear layers, in blocks of 64 with a float32 scale.

    While a block runs, one of its weights at a time is a tensor in the compute dtype.
    """
    largest: dict[str, int] = {}

    def quantized(p: ParameterFacts) -> ParameterFacts:
        name = p.name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if p.is_trainable or name not in linear:
            return p
        elements = p.tensor.shape[0] * p.tensor.shape[1]
        largest[p.unit] = max(largest.get(p.unit, 0), 2 * elements)
        tensor = replace(p.tensor, storage_bytes=-(-elements // 2) + 4 * -(-elements // 64))
        return replace(p, tensor=tensor, is_shardable=False)

    parameters = tuple(map(quantized, facts.parameters))
    moments = tuple(
        moment
        if moment.phase == "optimizer"
        else replace(moment, temporaries=moment.temporaries + largest.get(moment.unit, 0))
        for moment in trace.moments
    )
    return replace(facts, parameters=parameters), replace(trace, moments=moments)


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)
