"""Reads the records that ranks wrote when they ended (``worker.py``). An unreadable file counts as missing."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from echelon.diagnose.collectives import read_history
from echelon.diagnose.stall import Answer, Ending
from echelon.launch.failures.failure import ErrorRecord, Frame
from echelon.launch.local.worker import ERROR_FILE, is_user_file
from echelon.status.call_site import CallSite
from echelon.status.stack_reporter import ABORT_FILE, END_FILE

_TRAINING = ("/torch/nn/parallel/", "/torch/autograd/")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_PACKAGE = str(Path(__file__).resolve().parents[2]) + "/"
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def read_record(path: Path) -> ErrorRecord | None:
    """Return the main thread's error, or another thread's error if the main thread only called sys.exit after it."""
    try:
        records = [_record(data) for data in _load(path)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    main = [record for record in records if record.thread is None]
    threads = [record for record in records if record.thread is not None]
    if main and not (threads and main[-1].type == "SystemExit"):
        return main[-1]
    return threads[0] if threads else None


def _record(data: dict[str, Any]) -> ErrorRecord:
    return ErrorRecord(
        time_ns=int(data["time_ns"]),
        type=str(data["type"]),
        message=str(data["message"]),
        what=str(data.get("what") or ""),
        where=str(data.get("place") or ""),
        do=str(data.get("do") or ""),
        frames=tuple(Frame(**frame) for frame in data["frames"]),
        chain=tuple(str(text) for text in data["chain"]),
        thread=None if data["where"] == "main" else str(data["where"]),
    )


def read_answer(path: Path) -> Answer | None:
    """Return a rank's answer to a request for its stacks, or None if the answer cannot be read."""
    try:
        data = _load(path)
        call_site = None if data["call_site"] is None else CallSite(**data["call_site"])
        collectives = data["collectives"]
        return Answer(
            call_site=call_site,
            trains=bool(data["trains"]),
            loops=tuple(_loops_around(_places(data["stack"]))),
            histories=read_history(collectives),
            no_histories=str(collectives.get("missing", "")),
            ending=Ending(data.get("ending", "")),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def read_last_words(directory: Path) -> Answer | None:
    """Return the call site and the collectives that a rank recorded when it ended, or None if it recorded nothing."""
    for name in (ABORT_FILE, END_FILE):
        if (answer := read_answer(directory / name)) is not None:
            return answer
    try:
        data = next(d for d in reversed(_load(directory / ERROR_FILE)) if d["where"] == "main" and d["collectives"])
        frames = _record(data).frames
        users = [frame for frame in frames if frame.user]
        call_site = CallSite(file=users[-1].file, line=users[-1].line, source=users[-1].source) if users else None
        trains = any(part in frame.file for frame in frames for part in _TRAINING)
        return Answer(
            call_site=call_site,
            trains=trains,
            loops=tuple(_loops_around((frame.file, frame.line) for frame in reversed(frames))),
            histories=read_history(data["collectives"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StopIteration):
        return None


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _places(stack: Iterable[str]) -> list[tuple[str, int]]:
    """Return (file, line) for each frame that ``traceback.format_stack`` wrote, innermost first."""
    matches = [_FORMATTED_LINE.match(text) for text in stack]
    return [(match[1], int(match[2])) for match in reversed(matches) if match]


def _loops_around(places: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yield ``file:line`` for each loop whose body contains one of ``places`` (file, line), in the same order."""
    for file, line in places:
        if not _has_training_loops(file):
            continue
        try:
            tree = ast.parse(Path(file).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # for example code of a notebook; a missing loop only makes the diagnosis less precise
        for number in reversed(_loops_in(tree, line)):
            yield f"{file}:{number}"


def _has_training_loops(file: str) -> bool:
    """Return whether a loop in ``file`` may be a training loop: in user code or in a library with a Trainer."""
    if file.startswith(_PACKAGE):
        return file.startswith(_PACKAGE + "trainer/")
    return is_user_file(file) or (any(part in file for part in _INSTALLED) and "/torch/" not in file)


def _loops_in(tree: ast.AST, line: int) -> list[int]:
    """Return the lines of the loops around ``line``, outermost first, within its innermost function."""
    found: list[int] = []
    for node in ast.walk(tree):  # breadth first: outer nodes before those inside
        if isinstance(node, _FUNCTIONS):
            body = node.body if isinstance(node.body, list) else [node.body]
            if _contains(body, line) and body[0].lineno > node.lineno:
                found.clear()
        elif (isinstance(node, _LOOPS) and _contains(node.body, line)) or (
            isinstance(node, _COMPREHENSIONS) and _contains([node], line)
        ):
            found.append(node.lineno)
    return found


def _contains(nodes: Sequence[ast.stmt | ast.expr], line: int) -> bool:
    last = nodes[-1].end_lineno
    return nodes[0].lineno <= line <= (nodes[-1].lineno if last is None else last)


_FORMATTED_LINE = re.compile(r'  File "(.+)", line (\d+), in ')
_LINE = re.compile(r'  File "(.+)", line (\d+) in (.+)')


def read_stack(path: Path) -> tuple[Frame, ...]:
    """Return the stack that faulthandler wrote for the crashed thread, innermost frame first."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    start = text.find("Current thread")
    if start < 0:
        return ()
    lines = text[start:].split("\n\n")[0].splitlines()[1:]
    found = [match for match in map(_LINE.match, lines) if match]
    return tuple(
        Frame(file=m[1], line=int(m[2]), function=m[3], source=_source(m[1], int(m[2])), user=is_user_file(m[1]))
        for m in found
    )


def _source(path: str, line: int) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return next((text.strip()[:200] for number, text in enumerate(file, 1) if number == line), "")
    except OSError:
        return ""
