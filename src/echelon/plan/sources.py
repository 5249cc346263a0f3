"""The step that a plan is for: of a script, or of a model of transformers that exists only as a configuration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import is_available
from echelon.engines.chunked_loss import can_chunk_loss
from echelon.engines.fsdp.options import ShardingOptions
from echelon.plan.capture import Capture
from echelon.plan.devices import find_device
from echelon.plan.empty_model import library_named, read_config, trainable
from echelon.plan.facts import ModelFacts, ParallelLayout, ParameterFacts, StepSettings, StepTrace
from echelon.plan.trace import trace_step
from echelon.plan.verdict import StepSource, Variant, default_layout

_DTYPES = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32})
ENGINES = ("single", "ddp", "zero1", "fsdp2", "deepspeed")
"""The engines that a plan predicts."""


def _adamw_8bit(parameters: Iterable[nn.Parameter]) -> Optimizer:
    optimizer: Optimizer = library_named("bitsandbytes").optim.AdamW8bit(parameters)
    return optimizer


_OPTIMIZERS: MappingProxyType[str, tuple[str, Callable[[Iterable[nn.Parameter]], Optimizer]]] = MappingProxyType(
    {
        "adamw": ("AdamW", torch.optim.AdamW),
        "adamw8bit": ("AdamW8bit", _adamw_8bit),
        "sgd": ("SGD", torch.optim.SGD),
        "adafactor": ("Adafactor", torch.optim.Adafactor),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoices:
    """How a script wants its step to be distributed."""

    engine: str | None = None
    """None: it follows from the number of ranks."""
    stage: int = 3
    cpu_offload: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of mesh axes by their names."""
    master_weights: str = "float32"
    shares_batch: bool = False
    """Whether a batch is divided among the ranks that read different samples, instead of being that of one rank."""
    max_micro_batch: int | None = None
    """With ``shares_batch``, the most samples of a rank in one forward pass."""
    sharding: ShardingOptions | None = None
    """Selects the units that are sharded."""
    blocks: tuple[str, ...] = ()
    """Classes of the blocks that are recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step, what it is in words, how it would run by default, and other ways to build its model."""

    title: str
    source: StepSource
    settings: StepSettings
    accumulation: int = 1
    choices: StepChoices = field(default_factory=StepChoices)
    variants: tuple[Variant, ...] = ()

    def layout(
        self,
        world: int,
        *,
        engine: str | None = None,
        sizes: Mapping[str, int] | None = None,
        stage: int | None = None,
        cpu_offload: bool = False,
    ) -> ParallelLayout:
        """Return the layout on ``world`` ranks. What is given replaces what the script has chosen; its sizes and stage are of its engine.

        Raises:
            UsageError: the mesh has another number of ranks.
        """
        is_other = engine is not None and engine != self.choices.engine
        chosen = StepChoices(engine=engine) if is_other else self.choices
        layout = default_layout(
            self.settings,
            world,
            engine=chosen.engine,
            sizes=sizes or chosen.sizes,
            accumulation=self.accumulation,
            stage=stage or chosen.stage,
            cpu_offload=cpu_offload or chosen.cpu_offload,
        )
        if layout.world != world:
            raise UsageError(
                _("the mesh has {ranks} ranks, and there are {world} devices", ranks=layout.world, world=world),
                where="--mesh" if sizes else "ParallelismConfig",
                do=_("choose sizes whose product is {world}", world=world),
            )
        return layout


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

    def __init__(self, choice: ModelChoice) -> None:
        self.choice = choice
        self._config = read_config(choice.path)
        if self._config.pad_token_id is None:
            self._config.pad_token_id = 0
        self._config.use_cache = False  # as in a Trainer
        self._facts: ModelFacts | None = None
        self._traced: dict[StepSettings, StepTrace] = {}
        self._modules: dict[torch.dtype | None, tuple[nn.Module, frozenset[str]]] = {}

    @property
    def model(self) -> ModelFacts:
        """The model's facts, which a trace gives."""
        if self._facts is None:
            self.trace(StepSettings(micro_batch=1))
        assert self._facts is not None
        return self._facts

    @property
    def can_chunk_loss(self) -> bool:
        """Whether the model's head and loss can be computed in chunks of tokens."""
        return any(can_chunk_loss(module) for module, _linear in self._modules.values())

    def trace(self, settings: StepSettings) -> StepTrace:
        """Trace one step, once for the same settings."""
        if settings not in self._traced:
            self._traced[settings] = self._trace(settings)
        return self._traced[settings]

    def _trace(self, settings: StepSettings) -> StepTrace:
        module, linear = self._built(settings.mixed_precision)
        facts, trace = trace_step(
            module, _OPTIMIZERS[self.choice.optimizer][1], _loss, self._batch(settings.micro_batch), settings
        )
        if self.choice.load == "4bit":
            facts, trace = _with_4bit_weights(facts, trace, linear)
        self._facts = facts
        return trace

    def _built(self, mixed_precision: str) -> tuple[nn.Module, frozenset[str]]:
        """Return the model on the meta device, and the names of the weights that can be quantized."""
        dtype = _DTYPES.get(self.choice.load)
        if self.choice.load == "4bit":
            # What bitsandbytes multiplies with is in the dtype of autocast (bnb_4bit_compute_dtype), and is not kept for the backward pass.
            dtype = _DTYPES.get(mixed_precision, torch.bfloat16)
        if dtype not in self._modules:
            self._modules[dtype] = self._build(dtype)
        return self._modules[dtype]

    def _build(self, dtype: torch.dtype | None) -> tuple[nn.Module, frozenset[str]]:
        module: Any = trainable(self._config, dtype=dtype)
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
        parts = [
            _sizes_text((self._config.architectures or [self.model.class_name])[0], self.model),
            *([f"LoRA r={self.choice.lora}"] if self.choice.lora else []),
            *([_("4-bit weights")] if self.choice.load == "4bit" else []),
            _OPTIMIZERS[self.choice.optimizer][0],
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
        settings=settings,
        variants=tuple(_variants(choice)),
    )


class CapturedStep:
    """The step of a script, or of objects that an Accelerator was given."""

    def __init__(self, capture: Capture, choices: StepChoices) -> None:
        self._capture = capture
        self._choices = choices
        self._facts: ModelFacts | None = None

    @property
    def model(self) -> ModelFacts:
        """The model's facts, which a trace gives."""
        if self._facts is None:
            self.trace(self._capture.settings)
        assert self._facts is not None
        return self._facts

    @property
    def can_chunk_loss(self) -> bool:
        """Whether the model's head and loss can be computed in chunks of tokens."""
        return can_chunk_loss(self._capture.module)

    def trace(self, settings: StepSettings) -> StepTrace:
        """Trace the step once.

        Raises:
            UsageError: the step cannot be repeated with another number of samples.
        """
        self._facts, trace = self._capture.facts_and_trace(
            settings, sharding=self._choices.sharding, blocks=self._choices.blocks
        )
        return trace


def captured_step(
    capture: Capture, choices: StepChoices, *, world: int, micro_batch: int | None = None, name: str = ""
) -> PlannedStep:
    """Return the step of a captured script on ``world`` ranks, with its own settings.

    Args:
        micro_batch: samples of a rank in one forward pass, in place of the script's.
        name: what the step is called.

    Raises:
        UsageError: plans do not know the engine.
    """
    if choices.engine is not None and choices.engine not in ENGINES:
        raise UsageError(
            _("a plan does not know the engine {engine}", engine=choices.engine),
            do=_("choose one of {names}", names=", ".join(ENGINES)),
        )
    own, accumulation = _shared(capture, choices, world) if choices.shares_batch else _own(capture)
    settings = replace(capture.settings, micro_batch=micro_batch or own, master_weights=choices.master_weights)
    source = CapturedStep(capture, choices)
    title = ", ".join(
        [
            _sizes_text(source.model.class_name, source.model),
            type(capture.optimizer).__name__,
            _("mixed precision {mode}", mode=settings.mixed_precision),
        ]
    )
    return PlannedStep(
        title=f"{name}: {title}" if name else title,
        source=source,
        settings=settings,
        accumulation=accumulation,
        choices=choices,
    )


def _own(capture: Capture) -> tuple[int, int]:
    return capture.settings.micro_batch, capture.accumulation


def _shared(capture: Capture, choices: StepChoices, world: int) -> tuple[int, int]:
    """Return the micro-batch of a rank and the number of them, if ranks share the batch that one process has in the script."""
    micro_batch, accumulation = _own(capture)
    readers = max(1, world // math.prod(choices.sizes.get(axis, 1) for axis in ("tp", "cp", "pp")))
    most = choices.max_micro_batch
    total = -(-micro_batch * accumulation // readers)
    # A batch that was cut into parts of the largest size stays in such parts as long as a rank has enough samples.
    share = min(micro_batch, total) if most is not None and micro_batch >= most else -(-micro_batch // readers)
    return share, -(-total // share)


def _sizes_text(name: str, model: ModelFacts) -> str:
    sizes = [(math.prod(p.tensor.shape), p.is_trainable) for p in model.parameters]
    total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    return _("{name}: {total} parameters, {trained} trained", name=name, total=_count(total), trained=_count(trained))


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
