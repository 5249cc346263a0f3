"""Layouts on which a script is verified: a number of processes, and the engine that parallelizes over them."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.base.errors import UsageError
from echelon.engines.registry import ENGINES, load_engine

_MAX_PROCESSES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the script is distributed."""

    num_processes: int
    engine: str | None = None
    """None: what the script and its settings choose."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        processes = f"{self.num_processes} process{'' if self.num_processes == 1 else 'es'}"
        return processes if self.engine is None else f"{processes}, {self.engine}"

    @property
    def slug(self) -> str:
        """The same as a part of a path; ``{layout}`` in the script's arguments becomes this."""
        return str(self.num_processes) if self.engine is None else f"{self.num_processes}-{self.engine}"

    @property
    def is_plain(self) -> bool:
        """Whether it is the layout of the reference."""
        return self.num_processes == 1 and self.engine is None

    @property
    def flags(self) -> list[str]:
        """The flags of ``echelon launch`` that start it."""
        engine = [] if self.engine is None else ["--engine", self.engine]
        return ["--num_machines", "1", "--num_processes", str(self.num_processes), *engine]


def parse_layouts(procs: str, engines: str | None) -> list[Layout]:
    """Return a layout for each number of processes and engine, the smallest first.

    Args:
        procs: numbers of processes, separated by commas.
        engines: names of engines, separated by commas; None: the engine is not set.

    Raises:
        UsageError: a number of processes is not valid.
        ConfigError: an engine is unknown.
    """
    numbers = sorted({_number(word) for word in _words(procs, flag="--num_processes")})
    names: list[str | None] = [None] if engines is None else [*map(_engine, _words(engines, flag="--engines"))]
    return [Layout(num_processes=number, engine=name) for number in numbers for name in dict.fromkeys(names)]


def _words(text: str, *, flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        example = "1,2,4" if flag == "--num_processes" else "ddp,zero1,fsdp2"
        raise UsageError(f"{flag} is empty", where=f"flag {flag}", do=f"pass a list such as {flag} {example}")
    return words


def _number(word: str) -> int:
    if not word.isdigit() or not 1 <= int(word) <= _MAX_PROCESSES:
        raise UsageError(
            f"{word!r} is not a number of processes",
            where="flag --num_processes",
            do="pass positive integers, separated by commas, such as --num_processes 1,2,4",
        )
    return int(word)


def _engine(word: str) -> str:
    if word not in ENGINES:
        load_engine(word)  # of another package, or an error that suggests the closest name
    return word
