"""The recorded steps of one run: one file per rank, one JSON object per line.

``Trace`` is what the comparison reads; ``TraceWriter`` is what a recorder writes. Arrays are base64 of their bytes. A torn last line (of a
rank that was killed) is ignored.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from echelon.distributed.checks.sketch import Sketch, Sketches

NUM_PROJECTIONS = 4
"""Numbers that are kept of each sample's part of a module's output."""
VERSION = 6
"""Of what the events mean. Traces of different versions are not compared."""


RUN_FILE = "run.json"
"""In the folder of a run: what the child processes of ``echelon verify`` record."""


class Row(NamedTuple):
    """Identity of one sample: hashes of its contents, which also match if only the padding at the end differs."""

    whole: int
    """Hash of all leaves of the sample."""
    prefix: int
    """The same hash without the run of equal values at the end of each integer leaf (padding)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """First event of a file: what is recorded, and how."""

    kind: ClassVar[str] = "run"
    steps: int
    """Number of updates."""
    first_update: int = 0
    """Index of the first update of this process; greater than 0 after a resume."""
    batch_factor: int = 1
    """How many of the loader's batches are merged into one (1: none)."""
    is_float64: bool = False
    """Whether models and batches are converted to float64."""
    perturbation: int = 0
    """Seed of a change of all initial weights by one rounding, and of gradients; 0: none."""
    gradient_errors: dict[str, float] = field(default_factory=dict)
    """By how much each gradient (``"0:weight"``) is changed then, as a part of its norm."""
    seed: int = 0
    """Of the random number generators when the script begins; rank R seeds them with ``seed`` + R."""
    stacks_after_s: float = 0.0
    """Time after which the stacks of all threads are written to a file, for the report of a run that hangs."""
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, when its first forward pass begins. ``model`` is its index, equal on all ranks and layouts."""

    kind: ClassVar[str] = "model"
    model: int
    parameters: list[str]
    """Plain names, without prefixes of wrappers (``module.``, ``_orig_mod.``)."""
    dtypes: list[str]
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
    """``(number of rows, NUM_PROJECTIONS)``: a projection of each row of the output, in the order of the batch; ``(0, NUM_PROJECTIONS)`` if
    dim 0 is not the batch."""
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
    """``file:line`` of the user's call; of a Trainer's loss, of the user's code that computes it."""
    trainer_code: str = ""
    """Which code computes the loss of a Trainer (``LossCode``); empty if no Trainer calls ``backward``."""
    is_in_evaluation_mode: bool = False
    """Whether all forward passes with gradients since the last backward pass were in evaluation mode."""


Content: TypeAlias = Literal["local", "reduced", "clipped", "weights", "buffers", "optimizer_state", "saved", "loaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchedTensors:
    """Tensors that a rank has whole, or its shards of some. If an engine shards only some, there are two events.

    ``local``: gradients that backward added on this rank in one micro-step, before any reduction between ranks.
    ``reduced``: gradients in the optimizer (before the first clipping, if any).
    ``clipped``: gradients that the optimizer used, if clipping changed them.
    ``weights``, ``buffers`` (never sharded) and ``optimizer_state``: after an update (read when the next forward pass begins, or at the
    end); update -1: before the first.
    ``saved`` and ``loaded``: the training state when it is saved, or at the first training forward pass after it was loaded. ``update`` is
    the last update before it (-1: none). In a resumed process it is the same for the load as for the save.
    """

    kind: ClassVar[str] = "tensors"
    content: Content
    update: int
    names: list[str]
    """``"0:weight"`` of model 0, ``"0:weight/exp_avg"``; in a saved state also ``"buffer 0:bn.running_mean"`` and ``"lr 0"`` (of the
    optimizers' groups, counted)."""
    sketches: Sequence[Sketch]
    is_sharded: bool = False
    """Whether the sketches of all ranks add up to the whole tensor (else each rank has the whole)."""
    replica: int = 0
    """Under hybrid sharding, which copy of the shards it is: those of one replica add up."""
    micro_step: int = 0
    """Of gradients."""
    path: str = ""
    """Of a saved or loaded state."""
    line: str = ""
    """``file:line`` of the user's call that saves or loads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A call of a clipping function."""

    kind: ClassVar[str] = "clip"
    update: int
    micro_step: int
    norm: float
    """What the call returned."""
    max_norm: float
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """A step of an optimizer. It ends the update if no optimizer of the run has stepped in it before."""

    kind: ClassVar[str] = "optimizer_step"
    update: int
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
class Rng:
    """State of torch's random number generators on this rank when a forward pass of the root begins."""

    kind: ClassVar[str] = "rng"
    update: int
    micro_step: int
    torch: int
    draws_masks: bool
    """Whether the model draws random numbers in this pass (dropout in training mode)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that limits the comparison (for example: ``no local gradients under this engine``), or that ended the recording."""

    kind: ClassVar[str] = "note"
    update: int
    text: str


Event: TypeAlias = (
    RecordingSettings | Model | Batch | Forward | Loss | SketchedTensors | Clip | OptimizerStep | Rng | Note
)
_KINDS: dict[str, Any] = {one.kind: one for one in get_args(Event)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All events of one run, by rank, in the order in which they happened on that rank."""

    ranks: list[list[Event]]


class TraceWriter:
    """Appends events to the file of one rank, those of a pass in one go: each one by itself would take several times as long."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = file_of_rank(folder, rank).open("w", encoding="utf-8")
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        """Append ``event``; it reaches the disk with ``flush`` or ``close``."""
        self._events.append(event)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        events, self._events = self._events, []
        self._file.write("".join(map(_line_of, events)))
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
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
            values = json.loads(line, object_hook=_decoded)
            kind = _KINDS[values.pop("kind")]
            if kind is Batch:
                values["rows"] = [Row(*row) for row in values["rows"]]
            yield kind(**values)


def _line_of(event: Event) -> str:
    values = {"kind": event.kind, **{name: getattr(event, name) for name in event.__slots__}}
    if isinstance(event, SketchedTensors):
        values["sketches"] = Sketches.of(event.sketches)
    return _ENCODER.encode(values) + "\n"


def _encoded(value: Any) -> Any:
    if isinstance(value, Sketches):
        return {"numbers": value.numbers, "counts": value.counts}
    data = base64.b64encode(value.tobytes()).decode("ascii")
    return {"array": data, "dtype": value.dtype.str, "shape": value.shape}


def _decoded(values: dict[str, Any]) -> Any:
    if values.keys() == {"array", "dtype", "shape"}:
        found = np.frombuffer(base64.b64decode(values["array"]), dtype=values["dtype"])
        return found.reshape(values["shape"]).copy()
    return Sketches(**values) if values.keys() == {"numbers", "counts"} else values


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_encoded)
