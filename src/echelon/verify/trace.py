"""The recorded steps of one run: one file per rank, one JSON object per line.

``Trace`` is what the comparison reads; ``TraceWriter`` is what a recorder writes. Arrays are base64 of little-endian float64. A torn
last line (of a rank that was killed) is ignored.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from echelon.verify.sketch import NUM_BUCKETS, Sketch

__all__ = [
    "Batch",
    "Buffers",
    "Clip",
    "Event",
    "Forward",
    "Gradients",
    "Loss",
    "Model",
    "Note",
    "OptimizerState",
    "OptimizerStep",
    "Rng",
    "Row",
    "RecordedProcess",
    "SavedState",
    "Trace",
    "TraceWriter",
    "ModelWeights",
    "VERSION",
    "file_of_rank",
    "read_trace",
    "recorded_version",
]

VERSION = 2
"""Of what the events mean. Traces of different versions are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Identity of one sample: hashes of its contents, which also match if only the padding at the end differs."""

    whole: int
    """Hash of all leaves of the sample."""
    prefix: int
    """The same hash without the run of equal values at the end of each integer leaf (padding)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProcess:
    """First event of a file: which process this is."""

    kind: ClassVar[str] = "run"
    rank: int
    world_size: int
    script: str
    arguments: list[str]
    dtype: Literal["own", "float64"]
    batch_factor: int
    """How many of the loader's batches were merged into one (1: none)."""
    first_update: int = 0
    """Index of the first update of this process; greater than 0 after a resume."""
    torch: str = ""
    version: int = VERSION
    deterministic_masks: bool = True
    """Whether dropout masks were keyed by sample, so that they are the same on every layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, when its first forward pass begins. ``model`` is its index, equal on all ranks and layouts."""

    kind: ClassVar[str] = "model"
    model: int
    class_name: str
    parameters: list[str]
    """Plain names, without prefixes of wrappers (``module.``, ``_orig_mod.``)."""
    shapes: list[list[int]]
    """Shapes of the whole parameters."""
    dtypes: list[str]
    requires_grad: list[bool]
    tied: dict[str, str] = field(default_factory=dict)
    """Other names of a parameter, and its first name."""
    buffers: list[str] = field(default_factory=list)
    module_classes: dict[str, str] = field(default_factory=dict)
    """Module name to class name, for BatchNorm and dropout modules and for the leaves that record their outputs."""
    training: bool = True
    parity: str = "off"
    """The parity of the Accelerator or Trainer that runs the model, if there is one."""
    engine: str = ""
    """Its engine; empty if the script has no Accelerator or Trainer of echelon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch that the user's loop received (``loader``), or the inputs of the root model if no loader was seen (``inputs``)."""

    kind: ClassVar[str] = "batch"
    update: int
    micro_step: int
    source: Literal["loader", "inputs"]
    rows: list[Row]
    num_items: int | None = None
    """Number of labels that are not -100, if the batch has an integer leaf named ``labels``."""
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The output of one module in one forward pass."""

    kind: ClassVar[str] = "forward"
    update: int
    micro_step: int
    model: int
    module: str
    """``""`` is the root."""
    shape: list[int]
    rows: np.ndarray
    """``(number of rows, 4)``: a projection of each row of the output, in the order of the batch; ``(0, 4)`` if dim 0 is not the batch."""
    total: np.ndarray
    """``(NUM_BUCKETS,)``: projection of the whole output; zeros if there are rows."""
    is_training: bool = True
    is_without_padding: bool = False
    """Whether positions of padding in dim 1 count as zeros, so that the rows do not depend on how far the batch was padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A value on which ``backward`` was called."""

    kind: ClassVar[str] = "loss"
    update: int
    micro_step: int
    value: float
    weight: float | None
    """What the caller said that the loss is averaged over (``num_items=``), if it did."""
    gradient_scale: float = 1.0
    """The gradient that backward began with, if it is not 1."""
    line: str = ""
    """``file:line`` of the user's call."""
    is_in_evaluation_mode: bool = False
    """Whether all forward passes with gradients since the last backward pass were in evaluation mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Gradients of a model at one stage.

    ``local``: what backward added on this rank in one micro-step, before any reduction between ranks.
    ``reduced``: in the optimizer (before the first clipping, if any).
    ``clipped``: what the optimizer used, if clipping changed it.

    If an engine shards only some of the parameters, there are two events for a stage: of the shards, and of the others. The same
    applies to ``ModelWeights``, ``OptimizerState`` and ``SavedState``.
    """

    kind: ClassVar[str] = "gradients"
    stage: Literal["local", "reduced", "clipped"]
    update: int
    micro_step: int
    model: int
    names: list[str]
    """Parameters that have a gradient (on this rank a shard of one, if the engine shards)."""
    sketches: list[Sketch]
    is_sharded: bool = False
    """Whether the sketches of all ranks add up to the whole tensor (else each rank has the whole)."""
    replica: int = 0
    """Under hybrid sharding, which copy of the shards it is: those of one replica add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A call of a clipping function."""

    kind: ClassVar[str] = "clip"
    update: int
    micro_step: int
    norm: float
    """What the call returned."""
    max_norm: float
    norm_type: float = 2.0
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """A step of an optimizer. It ends the update if no optimizer of the run has stepped in it before."""

    kind: ClassVar[str] = "optimizer_step"
    update: int
    optimizer: int
    class_name: str
    lrs: list[float]
    """One per parameter group, before the step."""
    settings: list[dict[str, Any]]
    """The other scalar settings of each group."""
    group_of: dict[str, int]
    """Parameter name (``model.name``: ``"0:weight"``) to the index of its group."""
    is_skipped: bool = False
    """Whether a loss scaler skipped the step."""
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """Parameters after an update (read when the next forward pass begins, or at the end); update -1: before the first."""

    kind: ClassVar[str] = "weights"
    update: int
    model: int
    names: list[str]
    sketches: list[Sketch]
    is_sharded: bool = False
    replica: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Buffers of a model after an update."""

    kind: ClassVar[str] = "buffers"
    update: int
    model: int
    names: list[str]
    sketches: list[Sketch]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """Optimizer state after an update, by parameter: ``names`` are ``"0:weight/exp_avg"``."""

    kind: ClassVar[str] = "optimizer_state"
    update: int
    optimizer: int
    names: list[str]
    sketches: list[Sketch]
    is_sharded: bool = False
    replica: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rng:
    """Random number generators of this rank when a forward pass of the root begins."""

    kind: ClassVar[str] = "rng"
    update: int
    micro_step: int
    torch: int
    python: int
    numpy: int
    draws_masks: bool
    """Whether the model draws random numbers in this pass (dropout in training mode)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The training state when it is saved, or at the first training forward pass after it was loaded.

    ``update`` is the last update before it (-1: none). In a resumed process it is the same for the load as for the save.
    """

    kind: ClassVar[str] = "saved_state"
    action: Literal["save", "load"]
    update: int
    path: str
    names: list[str]
    """``"0:weight"``, ``"0:weight/exp_avg"``, ``"buffer 0:bn.running_mean"``, ``"lr 0"`` (of the optimizers' groups, counted)."""
    sketches: list[Sketch]
    is_sharded: bool = False
    replica: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that limits the comparison (for example: ``no local gradients under this engine``), or that ended the recording."""

    kind: ClassVar[str] = "note"
    update: int
    text: str


Event: TypeAlias = (
    RecordedProcess
    | Model
    | Batch
    | Forward
    | Loss
    | Gradients
    | Clip
    | OptimizerStep
    | ModelWeights
    | Buffers
    | OptimizerState
    | Rng
    | SavedState
    | Note
)
_KINDS: dict[str, Any] = {
    one.kind: one
    for one in (
        RecordedProcess,
        Model,
        Batch,
        Forward,
        Loss,
        Gradients,
        Clip,
        OptimizerStep,
        ModelWeights,
        Buffers,
        OptimizerState,
        Rng,
        SavedState,
        Note,
    )
}
_FIELDS: dict[Any, list[tuple[str, Any]]] = {
    kind: [(one.name, MISSING if one.name == "version" else one.default) for one in fields(kind)]
    for kind in _KINDS.values()
}
"""Name and default of each field. The version is always written."""
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_quoted = lru_cache(maxsize=1024)(_ENCODER.encode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All events of one run, by rank, in the order in which they happened on that rank."""

    ranks: list[list[Event]]


class TraceWriter:
    """Appends events to the file of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = file_of_rank(folder, rank).open("w", encoding="utf-8")

    def add(self, event: Event) -> None:
        """Append ``event``; it reaches the disk with ``flush`` or ``close``."""
        self._file.write(_line_of(event))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


def file_of_rank(folder: Path, rank: int) -> Path:
    """Return the path of the trace of ``rank`` in ``folder``."""
    return folder / f"rank_{rank}.trace.jsonl"


def read_trace(folder: Path) -> Trace:
    """Read the traces of all ranks in ``folder``; missing ranks have no events."""
    files = {int(path.name.split(".")[0].removeprefix("rank_")): path for path in folder.glob("rank_*.trace.jsonl")}
    num_ranks = max(files, default=-1) + 1
    return Trace(ranks=[list(_events(files[rank])) if rank in files else [] for rank in range(num_ranks)])


def recorded_version(folder: Path) -> int | None:
    """Return the ``VERSION`` with which the traces in ``folder`` were written (1 if they do not say it), or None if there are none."""
    for path in sorted(folder.glob("rank_*.trace.jsonl")):
        with path.open(encoding="utf-8") as file:
            line = file.readline()
        if line.endswith("\n"):
            return int(json.loads(line).get("version", 1))
    return None


def _events(path: Path) -> Iterator[Event]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            values = json.loads(line)
            kind = _KINDS[values.pop("kind")]
            yield kind(**{one.name: _decoded(one.name, values[one.name]) for one in fields(kind) if one.name in values})


def _line_of(event: Any) -> str:
    """Return ``event`` as a JSON object, without fields that have their default. Arrays are put in as they are: a JSON encoder would look
    at each character of them.
    """
    values = [
        f',"{name}":{_text(value)}'
        for name, default in _FIELDS[type(event)]
        if (value := getattr(event, name)) is not default
    ]
    return f'{{"kind":"{event.kind}"{"".join(values)}}}\n'


def _text(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)
    if value is True:
        return "true"
    if kind is np.ndarray:
        return _text_of_array(value)
    if kind is list and value:
        if isinstance(value[0], Sketch):
            return _text_of_sketches(value)
        if isinstance(value[0], Row):
            return "[" + ",".join([f'["{one.whole}","{one.prefix}"]' for one in value]) + "]"
        if isinstance(value[0], str):
            return _text_of_names(tuple(value))
    return _ENCODER.encode(value)


@lru_cache(maxsize=256)
def _text_of_names(names: tuple[str, ...]) -> str:
    return _ENCODER.encode(names)


def _text_of_array(value: np.ndarray) -> str:
    if not value.any():
        return _text_of_zeros(value.shape)
    data = base64.b64encode(value.astype("<f8", copy=False).tobytes()).decode("ascii")
    return f'{{"shape":{list(value.shape)},"data":"{data}"}}'


@lru_cache(maxsize=64)
def _text_of_zeros(shape: tuple[int, ...]) -> str:
    data = base64.b64encode(np.zeros(shape).tobytes()).decode("ascii")
    return f'{{"shape":{list(shape)},"data":"{data}"}}'


def _text_of_sketches(sketches: list[Sketch]) -> str:
    numbers = np.empty((len(sketches), NUM_BUCKETS + 1))
    numbers[:, :-1] = [one.projection for one in sketches]
    numbers[:, -1] = [one.square_sum for one in sketches]
    rest = ",".join([f'["{one.bits}",{one.num_elements},{one.num_nonfinite}]' for one in sketches])
    return f'{{"numbers":{_text_of_array(numbers)},"rest":[{rest}]}}'


def _decoded(name: str, value: Any) -> Any:
    if name == "rows" and isinstance(value, list):
        return [Row(whole=int(whole), prefix=int(prefix)) for whole, prefix in value]
    if isinstance(value, dict) and value.keys() == {"shape", "data"}:
        return np.frombuffer(base64.b64decode(value["data"]), dtype="<f8").reshape(value["shape"]).copy()
    if isinstance(value, dict) and value.keys() == {"numbers", "rest"}:
        numbers = _decoded("", value["numbers"])
        return [
            Sketch(
                projection=row[:-1],
                square_sum=float(row[-1]),
                bits=int(bits),
                num_elements=num_elements,
                num_nonfinite=num_nonfinite,
            )
            for row, (bits, num_elements, num_nonfinite) in zip(numbers, value["rest"], strict=True)
        ]
    return value
