"""What the reporter takes for a wait: torch's own calls, and not what hangs in something that torch has called."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

import pytest

import echelon
from echelon.status.call_site import StackSummary, summarize_stack

TORCH = "/usr/lib/python3/site-packages/torch/"


def called_through(*files: str) -> StackSummary:
    """Return what is seen of a stack with these files, the outermost first."""
    seen: list[Any] = []

    def look() -> None:
        frame: FrameType = sys._getframe(1)
        seen.append(summarize_stack(frame))

    call: Any = look
    for file in reversed(files):
        code = compile("def go(call):\n    call()\n", file, "exec")
        names: dict[str, Any] = {}
        exec(code, names)
        call = partial(names["go"], call)  # without a frame of its own
    call()
    return seen[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        (("train.py", TORCH + "distributed/distributed_c10d.py"), True),
        (("train.py", TORCH + "_tensor.py", TORCH + "autograd/graph.py"), True),
        (("train.py", TORCH + "distributed/rendezvous.py", sys.modules["threading"].__file__ or ""), True),
        (("train.py", TORCH + "autograd/graph.py", "/usr/lib/python3/site-packages/hooks/lock.py"), False),
        (("train.py", TORCH + "autograd/graph.py", "train.py"), False),
        # Autograd traces in a compiler, and waits for nobody.
        (("train.py", TORCH + "_dynamo/convert_frame.py", TORCH + "autograd/__init__.py"), False),
    ],
)
def test_a_wait_is_in_torch(files: tuple[str, ...], waits: bool) -> None:
    assert called_through(*files).communicates is waits


def test_imports_and_compilers_are_detected_but_not_user_code_in_imports() -> None:
    machinery = "<frozen importlib._bootstrap>"
    assert called_through("train.py", machinery, "/x/site-packages/big/__init__.py").imports
    assert not called_through("main.py", machinery, "train.py").imports
    assert called_through("train.py", TORCH + "_dynamo/convert_frame.py", TORCH + "autograd/__init__.py").compiles
    # Compilers of several ranks may agree on something, and then wait for each other.
    agreeing = called_through("train.py", TORCH + "_dynamo/convert_frame.py", TORCH + "distributed/distributed_c10d.py")
    assert (agreeing.compiles, agreeing.communicates) == (False, True)


@pytest.mark.parametrize(
    ("files", "elsewhere"),
    [
        (("train.py", echelon.__file__, sys.modules["threading"].__file__ or ""), False),
        (("train.py", echelon.__file__, TORCH + "distributed/distributed_c10d.py"), False),
        # A signal handler, in the middle of a wait of echelon.
        (("train.py", echelon.__file__, "/usr/lib/python3/site-packages/hooks/lock.py"), True),
        (("train.py", echelon.__file__, "train.py", sys.modules["threading"].__file__ or ""), True),
    ],
)
def test_code_that_interrupts_a_wait_is_not_a_wait(files: tuple[str, ...], elsewhere: bool) -> None:
    assert called_through(*files).is_elsewhere is elsewhere


def test_the_import_of_a_compiler_is_not_a_compilation() -> None:
    seen: list[StackSummary] = []
    file = TORCH + "_dynamo/convert_frame.py"
    names = {"look": lambda: seen.append(summarize_stack(sys._getframe(1)))}
    exec(compile("look()\ndef compile_it():\n    look()\ncompile_it()\n", file, "exec"), names)
    # The module's own lines run when it is imported; its functions compile, also those that it calls itself.
    assert [one.compiles for one in seen] == [False, True]
