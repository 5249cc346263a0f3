"""What a rank prints is copied to its log file, and to the terminal with one prefix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.launch.local.output import relay


def test_a_line_that_torch_has_prefixed_gets_no_second_prefix(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    written = b"[rank1]: Traceback\n[rank1]:   File\nplain\n[rank0]: of another\n[rank1]: end"
    reader, writer = os.pipe()
    thread = relay(reader, (tmp_path / "log").open("wb"), "stderr", prefix="[rank1]: ")
    os.write(writer, written)
    os.close(writer)
    thread.join()
    assert capfdbinary.readouterr().err.splitlines() == [
        *(b"[rank1]: Traceback", b"[rank1]:   File", b"[rank1]: plain", b"[rank1]: [rank0]: of another"),
        b"[rank1]: end",
    ]
    assert (tmp_path / "log").read_bytes() == written
