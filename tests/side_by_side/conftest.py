"""The processes that run scripts with accelerate and with echelon, for all tests in this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.side_by_side.run import PACKAGES, PEERS, Forks


@pytest.fixture(scope="session")
def peers() -> Path:
    """The Python with the libraries that echelon is compared with; without it, the test is skipped."""
    if not PEERS.exists():
        text = f"NOT COMPARED with accelerate and transformers: there is no {PEERS} (make peers)"
        assert os.environ.get("REQUIRE_PEERS") != "1", text
        pytest.skip(text)
    return PEERS


@pytest.fixture(scope="session")
def forks(peers: Path) -> Iterator[dict[str, Forks]]:
    with ExitStack() as stack:
        yield {package: stack.enter_context(closing(Forks(package))) for package in PACKAGES}
