"""A power failure at any instant of a save leaves a complete, verified checkpoint: the old or the new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from echelon.base.errors import CheckpointError
from echelon.checkpoint.background_save import BackgroundSaver
from echelon.checkpoint.commit import clean, place_of, retire
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.rotation import numbered, remove_oldest
from echelon.checkpoint.save import PendingCheckpoint, begin_save
from tests.checkpoint_ranks import content_of, on_threads, save_on_threads, world_of_threads
from tests.toy_storage import ToyStorage, WithoutExchange, crash_states, fingerprint

FOLDER = Path("/toy/run")
Muted = Callable[[str, str], bool]


def _saved(storage: ToyStorage, target: Path) -> int | None:
    """Return the step that is in ``target``, whole to the last value; None when there is no checkpoint."""
    with storage.used():
        return _step_in(target)


def _step_in(target: Path) -> int | None:
    try:
        checkpoint = Checkpoint(target)
        if checkpoint.problems():
            return None
    except CheckpointError:
        return None
    step: int = checkpoint.objects()["step"]
    assert torch.equal(checkpoint.read("w"), torch.full((3,), float(step)))
    for rank in range(checkpoint.manifest.world_size):
        assert torch.equal(checkpoint.read(f"of_rank_{rank}"), torch.full((2,), float(step)))
        assert checkpoint.rank_objects(rank) == {"mine": (step, rank)}
    assert checkpoint.manifest.progress == {"step": step}
    return step


@dataclass
class Scenario:
    """What was done to a storage, and what a crash in it must leave."""

    storage: ToyStorage
    found: Callable[[ToyStorage], int | None]
    start: int
    """The first operations that surely were done."""
    returned: int
    """After so many, the save had returned, and only the new checkpoint is good enough."""
    old: int | None
    new: int | None

    def check(self, *, max_pending: int) -> int:
        """Look at every crash state, and return how many there are."""
        known: dict[object, tuple[int | None, int | None]] = {}
        for done, state in crash_states(self.storage, start=self.start, max_pending=max_pending):
            mark = fingerprint(state)
            if mark not in known:
                known[mark] = (self.found(state), self._found_after_cleaning(state))
            allowed = {self.new} if done >= self.returned else {self.old, self.new}
            assert set(known[mark]) <= allowed, f"after {done} operations, and after cleaning: {known[mark]}"
        return len(known)

    def _found_after_cleaning(self, state: ToyStorage) -> int | None:
        with state.used():
            clean(FOLDER, belongs=lambda name: True)
        if state.kind(FOLDER) == "folder":
            assert not [name for name in state.entries(FOLDER) if ".tmp-" in name or ".old-" in name]
        return self.found(state)


def _write_foreign(storage: ToyStorage, step: int, rank: int, *, is_owner: bool, folder: Path) -> None:
    """Write what a rank has as another program does: without a sync."""
    names = [f"random_states_{rank}.pkl", *(["model.safetensors", "nested/optimizer.bin"] if is_owner else [])]
    for name in names:
        path = folder / name
        if path.parent != folder:
            storage.make_folder(path.parent)
        handle = storage.create(path)
        storage.write(handle, b"%d" % step)
        storage.write(handle, b", and the rest of it")
        storage.close(handle)


def _save_foreign(storage: ToyStorage, target: Path, step: int) -> None:
    with storage.used():
        on_threads(
            lambda world, gather: (
                PendingCheckpoint(
                    target=target,
                    write=lambda folder, is_owner: _write_foreign(
                        storage, step, world.rank, is_owner=is_owner, folder=folder
                    ),
                    world=world,
                    is_part=lambda name: name.startswith(("random_states", "model", "nested")),
                    gather=gather,
                )
                .begin()
                .finish()
            ),
            2,
        )


def _saved_foreign(storage: ToyStorage, target: Path) -> int | None:
    """Return the step of all files in ``target``. What has its name must be whole: nobody could see that it is not."""
    with storage.used():
        place = place_of(target)
    if storage.kind(place) is None:
        return None
    steps = set()
    for name in ("random_states_0.pkl", "random_states_1.pkl", "model.safetensors", "nested/optimizer.bin"):
        inode = storage._find(place / name)
        assert inode is not None, f"{place / name} is lost"
        content = bytes(storage.files[inode])
        assert content.endswith(b", and the rest of it"), f"{place / name} is cut off: {content!r}"
        steps.add(int(content[:1]))
    assert len(steps) == 1, f"{place} is a mixture of {steps}"
    return steps.pop()


@dataclass(frozen=True)
class Layout:
    """How a checkpoint of two ranks is saved, and which step is in one."""

    save: Callable[[ToyStorage, Path, int], None]
    saved: Callable[[ToyStorage, Path], int | None]


def _save(storage: ToyStorage, target: Path, step: int) -> None:
    with storage.used():
        save_on_threads(target, step)


OWN = Layout(_save, _saved)
FOREIGN = Layout(_save_foreign, _saved_foreign)  # another program's: no manifest, no checksums


def _nothing(operation: str, name: str) -> bool:
    return False


def _first(muted: Muted = _nothing, layout: Layout = OWN) -> Scenario:
    storage = ToyStorage(muted)
    layout.save(storage, FOLDER / "a", 1)
    found = partial(layout.saved, target=FOLDER / "a")
    return Scenario(storage, found, start=0, returned=len(storage.operations), old=None, new=1)


def _again(muted: Muted = _nothing, kind: type[ToyStorage] = ToyStorage, layout: Layout = OWN) -> Scenario:
    """Save into a path that has a checkpoint, and beside it what others have put there."""
    storage = kind()
    target = FOLDER / "a"
    layout.save(storage, target, 1)
    storage.make_folder(target / "notes")
    for path in (target / "notes" / "n.txt", target / "README"):
        handle = storage.create(path)
        storage.write(handle, b"mine")
        storage.sync(handle)
        storage.close(handle)
    for path in (target / "notes", target):
        storage.sync_folder(path)
    start = len(storage.operations)
    storage._muted = muted
    layout.save(storage, target, 2)
    returned = len(storage.operations)

    def found(state: ToyStorage) -> int | None:
        step = layout.saved(state, target)
        if step is not None:
            with state.used():
                folder = place_of(target)
            for path in (folder / "notes" / "n.txt", folder / "README"):
                assert state.kind(path) == "file", f"{path} is lost"
                assert bytes(state.files[state._find(path)]) == b"mine"  # type: ignore[index]
        return step

    return Scenario(storage, found, start=start, returned=returned, old=1, new=2)


def _rotated(muted: Muted = _nothing, layout: Layout = OWN) -> Scenario:
    """Save checkpoint_1, then delete checkpoint_0."""
    storage = ToyStorage()
    layout.save(storage, FOLDER / "checkpoint_0", 1)
    start = len(storage.operations)
    storage._muted = muted
    layout.save(storage, FOLDER / "checkpoint_1", 2)
    returned = len(storage.operations)
    with storage.used():
        remove_oldest(FOLDER, prefix="checkpoint_", limit=1)

    def found(state: ToyStorage) -> int | None:
        with state.used():
            paths = numbered(FOLDER, prefix="checkpoint_")
        steps = [layout.saved(state, path) for path in reversed(paths)]
        return next((step for step in steps if step is not None), None)

    return Scenario(storage, found, start=start, returned=returned, old=1, new=2)


def _in_background(muted: Muted = _nothing) -> Scenario:
    storage = ToyStorage(muted)
    saver = BackgroundSaver()
    with storage.used():
        for step in (1, 2):
            content = content_of(step, 0)
            saver.start(begin_save(FOLDER / "a", content, world=world_of_threads(0, 1)))
            for tensor in content.tensors.values():
                assert isinstance(tensor, torch.Tensor)
                tensor.fill_(-1)  # the training goes on
            if step == 1:
                saver.wait()
                start = len(storage.operations)
        saver.wait()
    found = partial(_saved, target=FOLDER / "a")
    return Scenario(storage, found, start=start, returned=len(storage.operations), old=1, new=2)


def _with_files_of_others(muted: Muted = _nothing) -> Scenario:
    """Save, and let a hook write files into the folder, which it does not sync."""
    storage = ToyStorage(muted)
    content = content_of(1, 0)

    def write(folder: Path, is_owner: bool) -> None:
        storage.make_folder(folder / "inside")
        for path in (folder / "extra", folder / "inside" / "deep"):
            handle = storage.create(path)
            storage.write(handle, b"of a hook")
            storage.close(handle)

    with storage.used():
        begin_save(FOLDER / "a", content, world=world_of_threads(0, 1), write=write).finish()

    def found(state: ToyStorage) -> int | None:
        step = _saved(state, FOLDER / "a")
        if step is not None:  # else it is no checkpoint, whatever else is there
            with state.used():
                assert {"extra", "inside/deep"} <= set(Checkpoint(FOLDER / "a").manifest.files)
        return step

    return Scenario(storage, found, start=0, returned=len(storage.operations), old=None, new=1)


def _under_its_other_name(kind: type[ToyStorage], muted: Muted) -> tuple[ToyStorage, int, Path]:
    """Return a storage in which a crash between two renames has left a foreign checkpoint, its start, and where it is."""
    storage = kind()
    _save_foreign(storage, FOLDER / "a", 1)
    old = FOLDER / f"a.old-{'0' * 16}"
    storage.rename(FOLDER / "a", old)
    storage.sync_folder(FOLDER)
    storage._muted = muted
    return storage, len(storage.operations), old


def _healed_foreign(muted: Muted = _nothing) -> Scenario:
    """Save where the old checkpoint lies under its other name, and crash again."""
    storage, start, _ = _under_its_other_name(WithoutExchange, muted)
    _save_foreign(storage, FOLDER / "a", 2)
    found = partial(_saved_foreign, target=FOLDER / "a")
    return Scenario(storage, found, start=start, returned=len(storage.operations), old=1, new=2)


def _deleted_foreign(muted: Muted = _nothing) -> Scenario:
    """Delete a checkpoint that lies under its other name: what a crash leaves of it must not pass for one."""
    storage, start, old = _under_its_other_name(ToyStorage, muted)
    with storage.used():
        retire(old)
    found = partial(_saved_foreign, target=FOLDER / "a")
    return Scenario(storage, found, start=start, returned=len(storage.operations), old=1, new=None)


SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "first": _first,
    "again": _again,
    "again, by two renames": partial(_again, kind=WithoutExchange),
    "rotated": _rotated,
    "in the background": _in_background,
    "with files of others": _with_files_of_others,
    "foreign, first": partial(_first, layout=FOREIGN),
    "foreign, again": partial(_again, layout=FOREIGN),
    "foreign, by two renames": partial(_again, kind=WithoutExchange, layout=FOREIGN),
    "foreign, rotated": partial(_rotated, layout=FOREIGN),
    "foreign, healed": _healed_foreign,
    "foreign, deleted": _deleted_foreign,
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_crash_state_has_a_complete_checkpoint(scenario: str) -> None:
    assert SCENARIOS[scenario]().check(max_pending=7) > 20


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_crash_state_of_all_subsets_has_a_complete_checkpoint(scenario: str) -> None:
    assert SCENARIOS[scenario]().check(max_pending=12) > 20


# Every sync and rename of a save: (scenario that needs it, operation, name).
GUARDS = [
    ("first", "sync", "rank_00000.safetensors"),
    ("first", "sync", "rank_00001.safetensors"),
    ("first", "sync", "rank_00000.json"),
    ("first", "sync", "rank_00001.json"),
    ("first", "sync", "objects.json"),
    ("first", "sync", "manifest.json"),
    ("first", "sync_folder", "toy"),
    ("first", "sync_folder", "a.tmp"),
    ("first", "sync_folder", "run"),
    ("first", "rename", "a.tmp"),
    ("again", "sync_folder", "notes"),
    ("again", "sync_folder", "a.tmp"),
    ("again", "sync_folder", "run"),
    ("again", "exchange", "a.tmp"),
    ("again, by two renames", "sync_folder", "run"),
    ("again, by two renames", "rename", "a"),
    ("again, by two renames", "rename", "a.tmp"),
    ("rotated", "sync_folder", "checkpoint_1.tmp"),
    ("rotated", "sync_folder", "run"),
    ("rotated", "rename", "checkpoint_1.tmp"),
    ("with files of others", "sync", "extra"),
    ("with files of others", "sync", "deep"),
    ("with files of others", "sync_folder", "inside"),
    ("foreign, first", "sync", "random_states_0.pkl"),
    ("foreign, first", "sync", "random_states_1.pkl"),
    ("foreign, first", "sync", "model.safetensors"),
    ("foreign, first", "sync", "optimizer.bin"),
    ("foreign, first", "sync_folder", "nested"),
    ("foreign, first", "sync_folder", "a.tmp"),
    ("foreign, first", "sync_folder", "run"),
    ("foreign, first", "rename", "a.tmp"),
    ("foreign, again", "exchange", "a.tmp"),
    ("foreign, by two renames", "sync_folder", "run"),
    ("foreign, by two renames", "rename", "a"),
    ("foreign, rotated", "rename", "checkpoint_0"),
    ("foreign, deleted", "rename", "a.old"),
    ("foreign, deleted", "sync_folder", "run"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "operation", "name"), GUARDS)
def test_every_sync_and_rename_is_necessary(scenario: str, operation: str, name: str) -> None:
    left_out = []

    def muted(this: str, of: str) -> bool:
        is_it = (this, of) == (operation, name)
        left_out.append(is_it)
        return is_it

    with pytest.raises((AssertionError, OSError, CheckpointError)):
        SCENARIOS[scenario](muted).check(max_pending=7)
    assert any(left_out)


def test_the_list_contains_every_sync_and_rename() -> None:
    found = set()
    for scenario in SCENARIOS:
        calls: list[tuple[str, str]] = []

        def muted(operation: str, name: str, calls: list[tuple[str, str]] = calls) -> bool:
            calls.append((operation, name))
            return False

        SCENARIOS[scenario](muted)
        found |= set(calls)
    assert found == {(operation, name) for _, operation, name in GUARDS}


def test_cleaning_repairs_a_crash_between_two_renames() -> None:
    storage = WithoutExchange()
    _save(storage, FOLDER / "a", 1)
    folder = storage._folder(FOLDER)
    storage.rename(FOLDER / "a", FOLDER / f"a.old-{'0' * 16}")
    assert _saved(storage, FOLDER / "a") == 1
    with storage.used():
        assert clean(FOLDER, belongs=lambda name: name == "b") == []
        assert clean(FOLDER, belongs=lambda name: name == "a") == [f"a.old-{'0' * 16}"]
    assert list(storage.folders[folder]) == ["a"]
    assert _saved(storage, FOLDER / "a") == 1
