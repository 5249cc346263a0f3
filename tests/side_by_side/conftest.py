"""The processes that run scripts with accelerate and with echelon, for all tests in this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tests.side_by_side.run import PACKAGES, PEERS, Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[dict[str, Forks]]:
    if not PEERS.exists():
        text = f"NOT COMPARED with accelerate: there is no {PEERS} (make peers)"
        assert os.environ.get("REQUIRE_PEERS") != "1", text
        pytest.skip(text)
    with ExitStack() as stack:
        yield {package: stack.enter_context(closing(Forks(package))) for package in PACKAGES}
