"""The second half of test_programs.py's first programs: a process of its own, because tests are divided by file."""

from __future__ import annotations

import pytest

from tests.programs.test_programs import CHUNK, SEEDS, require_drawn


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SEEDS // 2, SEEDS, CHUNK))
def test_a_drawn_program_is_that_of_one_process_or_is_refused_by_name(first: int) -> None:
    require_drawn(first, CHUNK)
