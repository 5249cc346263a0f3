"""Resuming over different data: an error with both values in the middle of an epoch, and a way to continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.errors import CheckpointError
from echelon.base.warnings import EchelonWarning
from echelon.data.data_facts import DataFacts, changes_between
from echelon.data.loader import PreparedLoader
from echelon.data.order_state import is_within_training_pass
from echelon.trainer import Trainer, TrainerCallback
from echelon.utils import GradientAccumulationPlugin, ProjectConfiguration
from tests.trainer_models import Line, arguments

PARITIES = ["off", "exact", "bitwise"]


def _loader(n: int, batch_size: int = 4, *, shuffle: bool = False, first: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(first, first + n)), batch_size=batch_size, shuffle=shuffle)


class _Run:
    """One start of a script with one loop over each loader."""

    def __init__(self, folder: Path, *loaders: DataLoader[Any], layout: str = "echelon", **options: Any) -> None:
        config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, checkpoint_format=layout)  # type: ignore[arg-type]
        options = {"seed": 3, **options} if options.get("parity", "off") != "off" else options
        self.accelerator = Accelerator(cpu=True, project_config=config, **options)
        self.model = self.accelerator.prepare(nn.Linear(1, 1))
        self.loaders: list[Any] = [self.accelerator.prepare(loader) for loader in loaders]
        self.read: list[tuple[int, list[int]]] = []

    def train(self, num_epochs: int, *, stop: int = -1) -> list[tuple[int, list[int]]]:
        """Read, and save after ``stop`` batches."""
        for epoch in self.accelerator.epochs(num_epochs):
            for loader in self.loaders:
                for (samples,) in loader:
                    self.read.append((epoch, samples.tolist()))
                    if len(self.read) == stop:
                        self.save()
                        return self.read
        return self.read

    def save(self) -> None:
        self.accelerator.save_state()
        self.accelerator.end_training()


def _flat(read: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    return [sample for of, samples in read if of == epoch for sample in samples]


def _refused(run: _Run, what: str, where: str) -> None:
    before = [parameter.clone() for parameter in run.model.parameters()]
    with pytest.raises(CheckpointError, match=rf"(?s)middle of an epoch.*{what}.*allow_changed_data=True.*{where}"):
        run.accelerator.resume()
    with pytest.raises(CheckpointError, match=what):
        run.accelerator.load_state()
    for one, other in zip(before, run.model.parameters()):
        assert torch.equal(one, other)  # nothing was loaded


@pytest.mark.parametrize("layout", ["echelon", "accelerate"])
def test_another_batch_size_without_parity_is_rejected_or_converted_by_samples(layout: str, tmp_path: Path) -> None:
    _Run(tmp_path, _loader(40), layout=layout).train(1, stop=7)  # 28 samples
    changed = r"loader\[0\]: its batch_size was 4 but is now 6"
    _refused(_Run(tmp_path, _loader(40, 6), layout=layout), changed, "after 24 of 40 samples; 4 of the 28")
    run = _Run(tmp_path, _loader(40, 6), layout=layout)
    with pytest.warns(
        EchelonWarning, match=rf"{changed}.*continues after 24 of 40 samples; 4 of the 28 .* will be repeated"
    ):
        assert run.accelerator.resume(allow_changed_data=True)
    assert run.train(1) == [(0, [*range(24, 30)]), (0, [*range(30, 36)]), (0, [*range(36, 40)])]
    run = _Run(tmp_path, _loader(40, 2), layout=layout)
    with pytest.warns(EchelonWarning, match="after 28 of 40 samples; 0 of the 28"):
        run.accelerator.resume(allow_changed_data=True)
    assert _flat(run.train(1), 0) == [*range(28, 40)]


def test_equal_global_batches_without_parity_need_the_same_ranks() -> None:
    """On others, 8 of one rank are not 4 of each of two: in the exact modes both numbers are those of all ranks together."""
    of_all, of_each = DataFacts(batch_size=8, split_batches=True), DataFacts(batch_size=4)
    assert not changes_between(of_all, of_each, num_ranks_saved=2, num_ranks=2)
    (change,) = changes_between(DataFacts(batch_size=8), of_each, num_ranks_saved=1, num_ranks=2)
    assert (change.fact, change.what) == ("batches", "its batch_size was 8 but is now 4")


def test_a_loaded_position_is_checked_before_reading_continues(tmp_path: Path) -> None:
    run = _Run(tmp_path / "one", _loader(40), parity="exact")
    run.train(1, stop=3)
    again = _Run(tmp_path / "other", _loader(40), parity="exact")
    assert not is_within_training_pass(again.loaders[0].order_state())
    again.loaders[0].load_state_dict(run.loaders[0].state_dict())
    assert is_within_training_pass(again.loaders[0].order_state())


@pytest.mark.sample(3)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("num_now", [64, 16])
def test_another_length_of_the_data_is_rejected_in_mid_epoch(
    num_now: int, parity: str, shuffle: bool, tmp_path: Path
) -> None:
    size = 8
    stop = 24 if parity == "bitwise" else 3  # 24 samples: there, in micro-steps of one
    _Run(tmp_path, _loader(40, size, shuffle=shuffle), parity=parity).train(2, stop=stop)
    changed = rf"loader\[0\]: it had 40 samples but now has {num_now}"
    place = rf"after 24 of {num_now} samples"
    _refused(_Run(tmp_path, _loader(num_now, size, shuffle=shuffle), parity=parity), changed, place)
    run = _Run(tmp_path, _loader(num_now, size, shuffle=shuffle), parity=parity)
    with pytest.warns(EchelonWarning, match=rf"{changed}.*continues {place}.*repeated or skipped"):
        assert run.accelerator.resume(allow_changed_data=True)
    read = run.train(2)
    assert len(_flat(read, 0)) == max(num_now - 24, 0)
    if not shuffle:
        assert _flat(read, 0) == [*range(24, num_now)]
    assert sorted(_flat(read, 1)) == [*range(num_now)]  # the next epoch is whole


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_data_that_grows_between_epochs_is_reported_and_used(parity: str, tmp_path: Path) -> None:
    run = _Run(tmp_path, _loader(8), parity=parity)
    for epoch in run.accelerator.epochs(1):
        run.read += [(epoch, i.tolist()) for (i,) in run.loaders[0]]
    run.save()
    run = _Run(tmp_path, _loader(12, 6), parity=parity)
    told = r"the next epoch uses the current data: loader\[0\]: it had 8 samples but now has 12; its batch_size was 4 but is now 6"
    with pytest.warns(EchelonWarning, match=told):
        assert run.accelerator.resume()
    assert run.train(2) == [(1, [*range(6)]), (1, [*range(6, 12)])]


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_other_samples_and_another_order_are_named(parity: str, tmp_path: Path) -> None:
    _Run(tmp_path, _loader(16), parity=parity).train(1, stop=2)
    other = r"loader\[0\]: the contents of its samples have changed: the fingerprint of \S+ was [0-9a-f]+ but is now [0-9a-f]+"
    _refused(_Run(tmp_path, _loader(16, first=100), parity=parity), other, "after 8 of 16 samples")
    order = r"its order was in sequence but is now shuffled"
    _refused(_Run(tmp_path, _loader(16, shuffle=True), parity=parity), order, "after 8 of 16 samples")
    run = _Run(tmp_path, _loader(16, shuffle=True), parity=parity)
    with pytest.warns(EchelonWarning, match=order):
        run.accelerator.resume(allow_changed_data=True)
    assert len(_flat(run.train(1), 0)) == 8


def test_another_seed_of_an_exact_order_is_named(tmp_path: Path) -> None:
    _Run(tmp_path, _loader(16, shuffle=True), parity="exact").train(1, stop=2)
    run = _Run(tmp_path, _loader(16, shuffle=True), parity="exact", seed=4)
    _refused(run, "the seed for its order was 3 but is now 4", "after 8 of 16 samples")
    _Run(tmp_path / "b", _loader(16), parity="exact").train(1, stop=2)
    assert _Run(tmp_path / "b", _loader(16), parity="exact", seed=4).accelerator.resume()  # in sequence without a seed


@pytest.mark.slow
def test_the_kind_of_order_may_change_if_changed_data_is_allowed(tmp_path: Path) -> None:
    """The state that an order was drawn from is that of its kind: another kind begins an order of its own."""
    data = TensorDataset(torch.arange(16))
    makes: list[Callable[[], tuple[DataLoader[Any], dict[str, Any]]]] = [
        lambda: (_loader(16), {}),
        lambda: (_loader(16, shuffle=True), {}),
        lambda: (_loader(16, shuffle=True), {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}),
        lambda: (DataLoader(data, batch_sampler=_Batches(SequentialSampler(data), 4, drop_last=False)), {}),
        lambda: (DataLoader(data, batch_size=4, sampler=_Reversed(data)), {}),
    ]
    for parity in ("off", "exact"):
        for i, make in enumerate(makes):
            folder = tmp_path / f"{parity}{i}"
            loader, options = make()
            _Run(folder, loader, parity=parity, **options).train(1, stop=2)
            for j, change in enumerate(makes):
                loader, options = change()
                run = _Run(folder, loader, parity=parity, **options)
                is_same = i == j or (parity == "exact" and {i, j} == {1, 2})
                if is_same:
                    assert run.accelerator.resume()
                else:
                    with pytest.warns(EchelonWarning, match="its order was"):
                        assert run.accelerator.resume(allow_changed_data=True)
                assert len(_flat(run.train(1), 0)) == 8, (parity, i, j)


class _Batches(BatchSampler):
    """A batch sampler of the user's."""


class _Reversed(SequentialSampler):
    """A sampler of the user's."""

    def __iter__(self) -> Any:
        return iter(range(len(self) - 1, -1, -1))


def test_the_changed_loader_is_named_and_evaluations_are_ignored(tmp_path: Path) -> None:
    run = _Run(tmp_path, _loader(8), _loader(8, 2), _loader(6))
    run.model.eval()
    for _ in run.loaders[2]:
        break
    run.model.train()
    run.loaders.pop()
    run.train(1, stop=3)  # in the first... the second one begins after two batches
    again = _Run(tmp_path, _loader(8), _loader(12, 2), _loader(60, 1))
    with pytest.raises(CheckpointError, match=r"since: loader\[1\]: it had 8 samples but now has 12\."):
        again.accelerator.resume()
    same = _Run(tmp_path, _loader(8), _loader(8, 2), _loader(60, 1))
    assert same.accelerator.resume()


def test_the_accumulation_may_change_under_one_global_batch(tmp_path: Path) -> None:
    def make(num_steps: int) -> _Run:
        plugin = GradientAccumulationPlugin(num_steps=num_steps)
        return _Run(tmp_path, _loader(40, 8, shuffle=True), parity="exact", gradient_accumulation_plugin=plugin)

    first = _flat(make(1).train(1, stop=3), 0)
    run = make(2)
    assert run.accelerator.resume()
    assert sorted(first + _flat(run.train(1), 0)) == [*range(40)]


class _Numbers(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n, self.given = n, 0

    def __iter__(self) -> Any:
        while self.given < self.n:
            self.given += 1
            yield (torch.tensor(self.given - 1),)
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("layout", ["echelon", "accelerate"])
@pytest.mark.parametrize("iterable", [False, True])
def test_a_stateful_loader_with_other_batches_is_rejected_or_restarted_by_samples(
    iterable: bool, layout: str, tmp_path: Path
) -> None:
    def make(batch_size: int) -> _Run:
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        loader = DataLoader(_Numbers(24), batch_size=batch_size) if iterable else _loader(24, batch_size)
        return _Run(tmp_path, loader, layout=layout, dataloader_config=config)

    make(4).train(1, stop=3)
    _refused(make(6), r"loader\[0\]: its batch_size was 4 but is now 6", "after 12")
    run = make(6)
    with pytest.warns(EchelonWarning, match="continues after 12"):
        run.accelerator.resume(allow_changed_data=True)
    assert _flat(run.train(1), 0) == [*range(12, 24)]
    run = make(4)
    assert run.accelerator.resume()
    assert _flat(run.train(1), 0) == [*range(12, 24)]


@pytest.mark.parametrize("layout", ["echelon", "accelerate"])
@pytest.mark.parametrize("parity", ["off", "exact"])
def test_older_checkpoints_without_a_fingerprint_load(
    parity: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parity == "exact" and layout == "accelerate":
        pytest.skip("the layouts have the same orders in them")
    whole = PreparedLoader.order_state

    def of_old(self: PreparedLoader) -> dict[str, Any]:
        return {key: value for key, value in whole(self).items() if key != "data"}

    with monkeypatch.context() as patch:
        patch.setattr(PreparedLoader, "order_state", of_old)
        _Run(tmp_path, _loader(16), parity=parity, layout=layout).train(1, stop=2)
    run = _Run(tmp_path, _loader(16), parity=parity, layout=layout)
    assert run.accelerator.resume()
    assert _flat(run.train(1), 0) == [*range(8, 16)]


def test_the_configuration_can_allow_changed_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _Run(tmp_path, _loader(8)).train(1, stop=1)
    monkeypatch.setenv("ECHELON_ALLOW_CHANGED_DATA", "true")
    run = _Run(tmp_path, _loader(12))
    with pytest.warns(EchelonWarning, match="continues after 4 of 12 samples"):
        assert run.accelerator.resume()
    assert _flat(run.train(1), 0) == [*range(4, 12)]
    with pytest.raises(CheckpointError, match="it had 8 samples but now has 12"):
        _Run(tmp_path, _loader(12)).accelerator.resume(allow_changed_data=False)


def test_fingerprinting_reads_no_sample_and_draws_no_random_number(tmp_path: Path) -> None:
    class Touchy(torch.utils.data.Dataset[Any]):
        reads = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[torch.Tensor]:
            Touchy.reads += 1
            return (torch.rand(()),)

    run = _Run(tmp_path, DataLoader(Touchy(), batch_size=4))
    before = torch.get_rng_state()
    run.save()
    assert Touchy.reads == 0
    assert torch.equal(torch.get_rng_state(), before)
    again = _Run(tmp_path, DataLoader(Touchy(), batch_size=4))
    assert again.accelerator.resume()
    assert Touchy.reads == 0


def test_changes_that_a_dataset_makes_itself_are_not_different_data(tmp_path: Path) -> None:
    class Drawn(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.order = list(range(8))

        def set_epoch(self, epoch: int) -> None:
            self.order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[torch.Tensor]:
            return (torch.tensor(self.order[index]),)

    for stop in (1, 3):
        folder = tmp_path / str(stop)
        first = _Run(folder, DataLoader(Drawn(), batch_size=4)).train(2, stop=stop)
        run = _Run(folder, DataLoader(Drawn(), batch_size=4))
        assert run.accelerator.resume()
        read = first + run.train(2)
        for epoch in (0, 1):
            assert sorted(_flat(read, epoch)) == [*range(8)]


# ---- the Trainer -----------------------------------------------------------------------------------------------------


class _Data(torch.utils.data.Dataset[Any]):
    """Notes which samples were read."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.x = torch.arange(first, first + n, dtype=torch.float32).reshape(n, 1) / 100
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.seen.append(index)
        return {"x": self.x[index], "labels": 2 * self.x[index, 0]}


class _Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True
        return control


def _trainer(folder: Path, data: _Data, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        **options,
    }
    return Trainer(Line(), arguments(folder, **settings), train_dataset=data, callbacks=[*callbacks])


CASES: list[dict[str, Any]] = [
    {},
    {"parity": "exact"},
    {"checkpoint_format": "transformers"},
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("num_now", [60, 20])
def test_a_trainer_with_data_of_another_length_is_rejected_in_mid_epoch(
    num_now: int, options: dict[str, Any], tmp_path: Path
) -> None:
    _trainer(tmp_path, _Data(40), _Stop(7), **options).train()  # 28 samples
    changed = rf"it had 40 samples but now has {num_now}"
    with pytest.raises(CheckpointError, match=rf"(?s)middle of an epoch.*{changed}.*allow_changed_data=True"):
        _trainer(tmp_path, _Data(num_now), **options).train(resume_from_checkpoint=True)
    for argument in (True, False):
        data = _Data(num_now)
        trainer = _trainer(tmp_path, data, allow_changed_data=argument, **options)
        with pytest.warns(EchelonWarning, match=rf"{changed}.*after 28 of {num_now} samples"):
            trainer.train(resume_from_checkpoint=True, **({} if argument else {"allow_changed_data": True}))
        assert data.seen == [*range(28, num_now), *range(num_now)]


@pytest.mark.parametrize("options", CASES)
def test_a_trainers_data_may_grow_between_epochs(options: dict[str, Any], tmp_path: Path) -> None:
    _trainer(tmp_path, _Data(40), _Stop(10), **options).train()
    data = _Data(60)
    trainer = _trainer(tmp_path, data, **options)
    with pytest.warns(EchelonWarning, match=r"it had 40 samples but now has 60"):
        trainer.train(resume_from_checkpoint=True)
    assert data.seen == [*range(60)]


def test_a_trainer_with_other_batches_resumes_by_samples(tmp_path: Path) -> None:
    _trainer(tmp_path, _Data(40), _Stop(7)).train()
    data = _Data(40)
    with pytest.warns(EchelonWarning, match=r"per_device_train_batch_size=2 \(saved: 4\)"):
        _trainer(tmp_path, data, per_device_train_batch_size=2).train(resume_from_checkpoint=True)
    assert data.seen == [*range(28, 40), *range(40)]
    with pytest.raises(CheckpointError, match="it had 40 samples but now has 44"), pytest.warns(EchelonWarning):
        _trainer(tmp_path, _Data(44), per_device_train_batch_size=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_epoch_of_a_transformers_checkpoint_reveals_different_data(accumulation: int, tmp_path: Path) -> None:
    options = {"checkpoint_format": "transformers", "gradient_accumulation_steps": accumulation}
    _trainer(tmp_path, _Data(40), _Stop(3), **options).train()
    (folder,) = tmp_path.glob("checkpoint-*")
    (folder / "echelon_data.json").unlink()  # as transformers itself writes it
    data = _Data(40)
    _trainer(tmp_path, data, **options).train(resume_from_checkpoint=True)
    assert data.seen[: 40 - 12 * accumulation] == [*range(12 * accumulation, 40)]
    changed = rf"step 3 was in epoch {0.3 * accumulation:g} .* is in epoch {0.2 * accumulation:g}"
    with pytest.raises(CheckpointError, match=rf"(?s){changed}.*allow_changed_data=True"):
        _trainer(tmp_path, _Data(60), **options).train(resume_from_checkpoint=True)
    data = _Data(60)
    with pytest.warns(EchelonWarning, match="training resumes after"):
        _trainer(tmp_path, data, allow_changed_data=True, **options).train(resume_from_checkpoint=True)
    assert data.seen[0] == 60 * 3 * accumulation // 10 // 4 * 4


def test_restarted_data_may_be_different(tmp_path: Path) -> None:
    _trainer(tmp_path, _Data(40), _Stop(7)).train()
    data = _Data(60)
    with pytest.warns(EchelonWarning, match="the next epoch uses the current data.*40 samples but now has 60"):
        _trainer(tmp_path, data, ignore_data_skip=True).train(resume_from_checkpoint=True)
    assert data.seen[:60] == [*range(60)]
