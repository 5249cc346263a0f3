"""AcceleratorState is a view of the most recent Accelerator and does not keep it alive."""

from __future__ import annotations

import gc

import pytest

from echelon import Accelerator, PartialState
from echelon.accelerator.current import _Built
from echelon.base.errors import UsageError
from echelon.config.sources import current
from echelon.state import AcceleratorState, is_initialized


@pytest.fixture(autouse=True)
def none_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the Accelerators that failed or cached calls of earlier tests still hold."""
    monkeypatch.setattr(_Built, "accelerators", ())


def test_it_is_a_view_of_the_most_recent_accelerator() -> None:
    gc.collect()
    first = Accelerator(mixed_precision="bf16")
    assert AcceleratorState().mixed_precision == "bf16"
    second = Accelerator()
    assert AcceleratorState().mixed_precision == "no"
    assert (first.state.mixed_precision, second.state.mixed_precision) == ("bf16", "no")
    assert first.state.num_processes == 1
    assert is_initialized()
    with pytest.raises(UsageError, match=r"set it only in Accelerator\(mixed_precision"):
        AcceleratorState(mixed_precision="fp16")


def test_without_an_accelerator_it_raises() -> None:
    accelerator = Accelerator()
    assert is_initialized()
    del accelerator
    gc.collect()
    assert not is_initialized()
    with pytest.raises(UsageError, match="there is no Accelerator yet"):
        AcceleratorState()
    assert PartialState().num_processes == 1


def test_after_deletion_of_the_most_recent_accelerator_the_previous_one_is_used() -> None:
    outer = Accelerator(mixed_precision="bf16")
    inner = Accelerator()
    assert AcceleratorState().mixed_precision == "no"
    del inner
    gc.collect()
    assert AcceleratorState().mixed_precision == outer.mixed_precision == "bf16"


def test_setting_debug_applies_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ECHELON_DEBUG", "ACCELERATE_DEBUG_MODE"):
        monkeypatch.setenv(name, "0")  # put back at the end
    state = PartialState()
    assert state.debug is False
    state.debug = True
    assert PartialState().debug is True
    assert current().value.debug is True  # what collectives ask
