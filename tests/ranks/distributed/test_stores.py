"""Ranks see each other's keys in the store of their group, from any thread."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from echelon.distributed import process_group, stores
from tests.harness import run_on_ranks


def _see_each_other(can_clone: bool) -> tuple[list[bytes], bool]:
    with pytest.MonkeyPatch.context() as patch, process_group():
        patch.setattr(stores, "_CAN_CLONE", can_clone)
        group = dist.group.WORLD
        assert group is not None
        own = stores.common_store(group, own_connection=True)
        shared = stores.common_store(group)
        own.set(f"from/{dist.get_rank()}", f"{dist.get_rank()}")
        found = [shared.get(f"from/{rank}") for rank in range(dist.get_world_size())]
        return found, stores.base_store(own) is not stores.base_store(shared)


@pytest.mark.parametrize("can_clone", sorted({stores._CAN_CLONE, False}))
def test_keys_set_on_a_separate_connection_are_visible_on_the_shared_one(can_clone: bool) -> None:
    # False: as in torch 2.7, whose stores cannot be cloned.
    assert run_on_ranks(_see_each_other, can_clone, world_size=3, init_group=False) == [([b"0", b"1", b"2"], True)] * 3
