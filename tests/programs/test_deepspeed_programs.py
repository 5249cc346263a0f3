"""Drawn programs for the engine deepspeed: each is a plain PyTorch loop, or is refused by name. Apart, because its import takes seconds."""

from __future__ import annotations

import os

import pytest

from tests.programs.program import draw_deepspeed_case
from tests.programs.test_programs import require_drawn

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.deepspeed, pytest.mark.soak]

CHUNK = 50
COUNT = int(os.environ.get("DRAWN_PROGRAMS", "10000")) // 10


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_any_drawn_program_is_that_of_one_process_or_is_refused_by_name(first: int) -> None:
    require_drawn(first, CHUNK, draw_deepspeed_case)
