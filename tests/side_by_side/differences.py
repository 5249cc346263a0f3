"""Deliberate differences from accelerate: both values, which the test asserts, and the reason.

The keys are (script, world size), then the name of the value, or "rank name" if the ranks differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    theirs: Any
    ours: Any
    reason: str


def _each(names: str, theirs: Sequence[Any], ours: Sequence[Any], reason: str) -> dict[str, Difference]:
    """Return one difference for each name; ``names`` are separated by commas."""
    triples = zip(names.split(", "), theirs, ours, strict=True)
    return {name: Difference(theirs=one, ours=other, reason=reason) for name, one, other in triples}


_DEVICE = "a tensor's device is `cpu`, never `cpu:0`, and `tensor.device == accelerator.device` must be true"
_WINDOW = "in the last accumulation window of an epoch, the loss is divided by the actual number of micro-batches (1), not by 3"
_SCALER = (
    "accelerate's loss scaler is disabled on devices other than CUDA, so a step with infinite gradients is not skipped"
)
_SAMPLER = "the order of every loader is saved; accelerate saves it only with use_seedable_sampler"
_RESUMED = "after load_state, a shuffled loader continues in the same order; accelerate's loader changes its order on two processes"
_COMPILED = "with keep_torch_compile=False, accelerate only unwraps DDP and returns the compiled module"
_SHUFFLE = "with any number of processes, the loader yields samples in the same order as an unprepared loader"
_NONE = "with reduction='none', each rank keeps its own value, as accelerate's documentation says; accelerate's code computes the sum"
_SCALE = "`scale=` is applied; accelerate ignores it except on XLA"
_TRACKER = (
    "a tracker with main_process_only=False logs on every process; accelerate starts trackers only on the main process"
)

_RANDOM = ["random_states_0.pkl", "random_states_1.pkl"]

DIFFERENCES: dict[tuple[str, int], dict[str, Difference]] = {
    ("02_process_facts", 2): _each("device, state.device", ["cpu:0"] * 2, ["cpu"] * 2, _DEVICE),
    ("03_partial_state", 2): _each("device", ["cpu:0"], ["cpu"], _DEVICE),
    ("05_accumulation_plugin", 1): _each(
        "partial_window:weight",
        [[[0.40969517827033997, 0.26046323776245117]]],
        [[[0.47047191858291626, 0.27365437150001526]]],
        _WINDOW,
    ),
    ("05_accumulation_plugin", 2): _each(
        "partial_window:weight",
        [[[0.10268959403038025, 0.4097720980644226]]],
        [[[0.1931968480348587, 0.356521874666214]]],
        _WINDOW.replace("(1)", "(2)"),
    ),
    ("07_metrics", 1): _each(
        "gather of a scalar",
        [1.0],
        [[1.0]],
        "gather() returns one element per process, even if there is only one process",
    ),
    ("10_random_order", 2): _each(
        "0 one seed, 0 one seed#2, 0 one seed#3, 0 one seed#4, 1 one seed, 1 one seed#2, 1 one seed#3, 1 one seed#4",
        [[7, 2, 0], [10, 9, 5], [11, 1, 5], [10, 8, 4], [8, 6, 11], [1, 4, 3], [9, 0, 6], [7, 3, 2]],
        [[2, 5, 10], [8, 7, 3], [3, 2, 11], [8, 10, 9], [4, 0, 1], [9, 6, 11], [6, 0, 4], [5, 1, 7]],
        _SHUFFLE,
    ),
    ("12_loss_scaling", 1): _each(
        "skipped#2, lr#2, lr#3, finite",
        [[False, False], [0.025], [0.0125], False],
        [[True, True], [0.05], [0.025], True],
        _SCALER,
    ),
    ("12_loss_scaling", 2): _each(
        "skipped#2, lr#2, lr#3, finite",
        [[False, False], [0.00625], [0.0015625], False],
        [[True, True], [0.025], [0.00625], True],
        _SCALER,
    ),
    ("14_checkpoints", 1): _each(
        "files, files by hand, files shuffled",
        [
            ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "scheduler.bin"],
            ["optimizer.bin", "pytorch_model.bin", "random_states_0.pkl", "scheduler.bin"],
            ["model.safetensors", "optimizer.bin", "random_states_0.pkl"],
        ],
        [
            ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "sampler.bin", "scheduler.bin"],
            ["optimizer.bin", "pytorch_model.bin", "random_states_0.pkl", "sampler.bin", "scheduler.bin"],
            ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "sampler.bin"],
        ],
        _SAMPLER,
    ),
    ("14_checkpoints", 2): {
        **_each(
            "files, files by hand, files shuffled",
            [
                ["model.safetensors", "optimizer.bin", *_RANDOM, "scheduler.bin"],
                ["optimizer.bin", "pytorch_model.bin", *_RANDOM, "scheduler.bin"],
                ["model.safetensors", "optimizer.bin", *_RANDOM],
            ],
            [
                ["model.safetensors", "optimizer.bin", *_RANDOM, "sampler.bin", "scheduler.bin"],
                ["optimizer.bin", "pytorch_model.bin", *_RANDOM, "sampler.bin", "scheduler.bin"],
                ["model.safetensors", "optimizer.bin", *_RANDOM, "sampler.bin"],
            ],
            _SAMPLER,
        ),
        **_each("shuffled again", [False], [True], _RESUMED),
    },
    ("15_saving", 2): _each(
        "bare, names",
        [[True, "OptimizedModule"], ["_orig_mod.bias", "_orig_mod.weight"]],
        [[False, "Linear"], ["bias", "weight"]],
        _COMPILED,
    ),
    ("16_trackers", 2): _each(
        "1 mine",
        [[]],
        [
            [
                "start",
                ["config", {"lr": 0.1, "layers": 2, "name": "small", "deep": True}],
                ["log", {"loss": 1.0}, 0, {"note": "hello"}],
                ["log", {"loss": 0.5}, 1, {"note": "hello"}],
                ["log", {"loss": 1 / 3}, 2, {"note": "hello"}],
                ["log", {"accuracy": 0.5}, None, {}],
                "finish",
            ]
        ],
        _TRACKER,
    ),
    ("18_collectives", 1): _each("reduce scaled", [[1.0]], [[3.0]], _SCALE),
    ("18_collectives", 2): {
        **_each("reduce scaled", [[2.0]], [[6.0]], _SCALE),
        **_each("0 reduce none, 1 reduce none", [[4.0, 2.0]] * 2, [[1.0, 1.0], [3.0, 1.0]], _NONE),
    },
}
