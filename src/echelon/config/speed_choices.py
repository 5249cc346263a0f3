"""What ``speed`` chooses: faster ways of computing the same updates, when each applies, and its measured effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.base.messages.translation import gettext as _, gettext_noop as N_


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChoice:
    """One faster way, which ``speed="safe"`` or ``speed="max"`` chooses wherever it applies."""

    name: str
    mode: Literal["safe", "max"]
    """``safe``: bit-equal to the plain loop. ``max``: the same mathematics with different rounding; includes ``safe``."""
    applies: str
    effect: str
    """Measured by benchmarks/speed.py."""


SPEED_CHOICES = (
    SpeedChoice(
        name=N_("whole batches"),
        mode="safe",
        applies=N_("TensorDataset (or Subset of one), torch's own collation, num_workers=0"),
        effect=N_("reads batches of 64 MNIST-size samples 3 times as fast"),
    ),
    SpeedChoice(
        name=N_("foreach optimizer"),
        mode="safe",
        applies=N_(
            "torch's SGD, Adam, AdamW, Adagrad, RMSprop, Adamax, Adadelta on the CPU with 8 or more small parameters"
        ),
        effect=N_("optimizer steps 1.3 to 1.7 times as fast"),
    ),
    SpeedChoice(
        name=N_("bf16 autocast"),
        mode="max",
        applies=N_("mixed_precision is not set, and the device computes bf16 natively"),
        effect=N_("a step of the MNIST example 1.65 times as fast on a CPU with avx512_bf16"),
    ),
    SpeedChoice(
        name=N_("fused optimizer"),
        mode="max",
        applies=N_("torch's SGD, Adam, AdamW, Adagrad, if the script sets neither fused nor foreach"),
        effect=N_("AdamW's steps 2.8 to 5.9 times as fast on the CPU"),
    ),
    SpeedChoice(
        name=N_("channels last"),
        mode="max",
        applies=N_("models with Conv2d, whole on each device, on CUDA, or in bf16 on CPUs that compute it natively"),
        effect=N_("a bf16 step of the MNIST example 1.18 times as fast on a CPU; not measured on CUDA"),
    ),
)


def speed_table(speed: str) -> str:
    """Return one line for each choice of ``speed``."""
    modes = {"off": (), "safe": ("safe",), "max": ("safe", "max")}[speed]
    rows = [(one.name, one.applies, one.effect) for one in SPEED_CHOICES if one.mode in modes]
    return "\n".join(
        "  " + _("{name}: {effect}; if {applies}", name=_(name), effect=_(effect), applies=_(applies))
        for name, applies, effect in rows
    )
