"""The recorded steps of one run: one file per rank, one JSON object per line.

``Trace`` is what the comparison reads; ``TraceWriter`` is what a recorder writes. Arrays are base64 of little-endian float64. The elements
of small tensors are in a second file, one after the other in the order of the lines. A torn last line (of a rank that was killed) is ignored.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from echelon.verify.sketch import NUM_BUCKETS, Raw, Sketch, Sketches

__all__ = [
    "Batch",
    "Buffers",
    "Clip",
    "Event",
    "Forward",
    "ForwardPass",
    "Gradients",
    "Loss",
    "Model",
    "NUM_PROJECTIONS",
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

NUM_PROJECTIONS = 4
"""Numbers that are kept of each sample's part of a module's output."""
VERSION = 4
"""Of what the events mean. Traces of different versions are not compared."""


class Row(NamedTuple):
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
    lines: dict[str, str] = field(default_factory=dict)
    """Module name to ``file:line`` of the user's ``forward`` that calls it (``""``: the root's own ``forward``), where that is known."""
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
    """``(number of rows, NUM_PROJECTIONS)``: a projection of each row of the output, in the order of the batch; ``(0, NUM_PROJECTIONS)`` if dim 0 is not the
    batch."""
    total: np.ndarray
    """``(NUM_BUCKETS,)``: projection of the whole output; zeros if there are rows."""
    is_training: bool = True
    is_without_padding: bool = False
    """Whether positions of padding in dim 1 count as zeros, so that the rows do not depend on how far the batch was padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """The outputs of the modules of one forward pass, as they are written; ``read_trace`` makes a ``Forward`` of each."""

    kind: ClassVar[str] = "forwards"
    update: int
    micro_step: int
    model: int
    modules: list[str]
    shapes: list[list[int]]
    num_rows: list[int]
    """0: the numbers of a module are its ``total``."""
    is_without_padding: list[bool]
    numbers: np.ndarray
    """``rows`` or ``total`` of each module, one after the other."""

    def events(self) -> Iterator[Forward]:
        """Yield one event for each module."""
        start = 0
        for module, shape, num, is_without_padding in zip(
            self.modules, self.shapes, self.num_rows, self.is_without_padding, strict=True
        ):
            stop = start + (num * NUM_PROJECTIONS if num else NUM_BUCKETS)
            own, start = self.numbers[start:stop], stop
            yield Forward(
                update=self.update,
                micro_step=self.micro_step,
                model=self.model,
                module=module,
                shape=shape,
                rows=own.reshape(num, NUM_PROJECTIONS) if num else np.zeros((0, NUM_PROJECTIONS)),
                total=np.zeros(NUM_BUCKETS) if num else own,
                is_without_padding=is_without_padding,
            )


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
    """``file:line`` of the user's call; of a Trainer's loss, of the user's code that computes it."""
    trainer_code: str = ""
    """Which code computes the loss of a Trainer (``LossCode``); empty if no Trainer calls ``backward``."""
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
    sketches: Sequence[Sketch]
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
    sketches: Sequence[Sketch]
    is_sharded: bool = False
    replica: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Buffers of a model after an update."""

    kind: ClassVar[str] = "buffers"
    update: int
    model: int
    names: list[str]
    sketches: Sequence[Sketch]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """Optimizer state after an update, by parameter: ``names`` are ``"0:weight/exp_avg"``."""

    kind: ClassVar[str] = "optimizer_state"
    update: int
    optimizer: int
    names: list[str]
    sketches: Sequence[Sketch]
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
    sketches: Sequence[Sketch]
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
    | ForwardPass
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
        ForwardPass,
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
_READ: dict[Any, Callable[[Any], tuple[Any, ...]]] = {
    kind: attrgetter(*(name for name, _ in _FIELDS[kind])) for kind in _FIELDS
}
_BEGINS = {kind: [(f',"{name}":', default) for name, default in _FIELDS[kind]] for kind in _FIELDS}
_SKETCHED = (Gradients, ModelWeights, Buffers, OptimizerState, SavedState)
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
        path = file_of_rank(folder, rank)
        self._file, self._values_file = path.open("wb", buffering=0), _values_of(path).open("wb", buffering=0)
        self._lines: list[str] = []
        self._values: list[Any] = []
        self._latest: Sequence[Sketch] | None = None

    def add(self, event: Event) -> None:
        """Append ``event``; it reaches the disk with ``flush`` or ``close``."""
        if not isinstance(event, _SKETCHED):
            self._lines.append(_line_of(event))
        elif event.sketches is self._latest:
            self._lines.append(_line_of(event, _SAME))
        else:
            self._latest = event.sketches
            self._lines.append(_line_of(event))
            if isinstance(event.sketches, Sketches) and event.sketches.raw is not None:
                self._values.append(event.sketches.raw.values.data)

    def flush(self) -> None:
        """Hand everything to the operating system, the elements first."""
        lines, self._lines = self._lines, []
        values, self._values = self._values, []
        _write(self._values_file, b"".join(values))
        _write(self._file, "".join(lines).encode())

    def close(self) -> None:
        """Flush and close the files."""
        self.flush()
        self._values_file.close()
        self._file.close()


def _write(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _values_of(path: Path) -> Path:
    """Return the path of the elements that belong to the lines in ``path``."""
    return path.with_name(path.name.split(".")[0] + ".values")


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
    elements = _Elements(_values_of(path))
    latest: list[Sketch] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            values = json.loads(line)
            kind = _KINDS[values.pop("kind")]
            found = values.get("sketches")
            if found is not None:
                latest = latest if found == _SAME_VALUE else _read_sketches(found, elements)
                values["sketches"] = latest
            event = kind(
                **{one.name: _decoded(one.name, values[one.name]) for one in fields(kind) if one.name in values}
            )
            if isinstance(event, ForwardPass):
                yield from event.events()
            else:
                yield event


class _Elements:
    """Reads the file of elements in the order in which it was written."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes() if path.exists() else b""
        self._position = 0

    def take(self, count: int, kind: str) -> np.ndarray:
        """Return the next ``count`` elements."""
        found = np.frombuffer(self._data, dtype=kind, count=count, offset=self._position)
        self._position += found.nbytes
        return found.copy()


def _read_sketches(found: Any, elements: _Elements) -> list[Sketch]:
    if "raw" in found:
        sizes = tuple(found["sizes"])
        return list(Sketches(None, None, Raw(elements.take(sum(sizes), found["raw"]), sizes)))
    counts = np.frombuffer(base64.b64decode(found["counts"]), dtype="<i8").reshape(-1, 3)
    return list(Sketches(_decoded("", found["numbers"]), counts))


_SAME_VALUE = "same"
"""In place of sketches: those of the latest event that has some."""
_SAME = f'"{_SAME_VALUE}"'
_BEGIN_OF_SKETCHES = ',"sketches":'


def _line_of(event: Any, sketches: str | None = None) -> str:
    """Return ``event`` as a JSON object, without fields that have their default. Arrays are put in as they are: a JSON encoder would look
    at each character of them.

    Args:
        sketches: text in place of the event's sketches.
    """
    kind = type(event)
    values = [
        begin + (_text(value) if sketches is None or begin != _BEGIN_OF_SKETCHES else sketches)
        for (begin, default), value in zip(_BEGINS[kind], _READ[kind](event))
        if value is not default
    ]
    return f'{{"kind":"{event.kind}"{"".join(values)}}}\n'


def _text(value: Any) -> str:
    text = _TEXTS.get(type(value))
    return _ENCODER.encode(value) if text is None else text(value)


def _text_of_float(value: float) -> str:
    return repr(value) if math.isfinite(value) else _ENCODER.encode(value)


def _text_of_list(value: list[Any]) -> str:
    if value:
        kind = type(value[0])
        if kind is str:
            return _text_of_names(tuple(value))
        if kind is Row:
            return "[" + ",".join([f'["{one.whole}","{one.prefix}"]' for one in value]) + "]"
        if kind is Sketch:
            return _text_of_sketches(Sketches.of(value))
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


def _text_of_sketches(sketches: Sketches) -> str:
    if sketches.raw is not None:
        kind = "<f4" if sketches.raw.values.itemsize == 4 else "<f8"
        return f'{{"sizes":{_text_of_sizes(sketches.raw.sizes)},"raw":"{kind}"}}'
    counts = base64.b64encode(sketches.counts.astype("<i8", copy=False).tobytes()).decode("ascii")
    return f'{{"numbers":{_text_of_array(sketches.numbers)},"counts":"{counts}"}}'


@lru_cache(maxsize=256)
def _text_of_sizes(sizes: tuple[int, ...]) -> str:
    return _ENCODER.encode(sizes)


_TEXTS: dict[type, Callable[[Any], str]] = {
    str: _quoted,
    int: repr,
    float: _text_of_float,
    np.ndarray: _text_of_array,
    Sketches: _text_of_sketches,
    list: _text_of_list,
}


def _decoded(name: str, value: Any) -> Any:
    if name == "rows" and isinstance(value, list):
        return [Row(whole=int(whole), prefix=int(prefix)) for whole, prefix in value]
    if isinstance(value, dict) and value.keys() == {"shape", "data"}:
        return np.frombuffer(base64.b64decode(value["data"]), dtype="<f8").reshape(value["shape"]).copy()
    return value
