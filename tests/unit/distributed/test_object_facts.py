"""What is recorded of optimizers, models and loaders is what they have."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from echelon.distributed.record.object_facts import loader_facts, model_facts, optimizer_facts


def test_options_that_differ_between_groups_are_lists_and_defaults_are_named() -> None:
    one, two = nn.Linear(2, 1), nn.Linear(1, 1)
    groups = [{"params": one.parameters()}, {"params": two.parameters(), "weight_decay": 0.0, "lr": 1.0}]
    facts, defaults = optimizer_facts(torch.optim.AdamW(groups, lr=1e-3, eps=1e-6))
    wanted = {"class": "AdamW", "num_groups": 2, "lr": [1e-3, 1.0], "weight_decay": [0.01, 0.0], "eps": 1e-6}
    assert wanted.items() <= facts.items()
    assert "betas" in defaults
    assert not {"lr", "eps", "weight_decay", "class"} & set(defaults)  # a rate is shown, also the default one
    assert "foreach" not in facts  # None


def test_the_learning_rate_is_the_one_before_the_schedule() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert optimizer_facts(optimizer)[0]["lr"] == 0.5
    assert optimizer_facts(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=torch.tensor(0.25)))[0]["lr"] == 0.25


def test_shared_and_frozen_parameters_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert model_facts(model) == {"class": "Sequential", "num_parameters": 20, "num_trainable_parameters": 16}
    assert model_facts(nn.LazyLinear(3)) == {"class": "LazyLinear"}


def test_what_a_loader_does_not_know_is_left_out() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from range(3)

    loader = DataLoader(TensorDataset(torch.zeros(10)), batch_size=4)
    assert loader_facts(loader, total_batch_size=8) == {
        "dataset": "TensorDataset",
        "dataset_length": 10,
        "batch_size": 4,
        "total_batch_size": 8,
    }
    assert loader_facts(DataLoader(Stream(), batch_size=None), total_batch_size=None) == {"dataset": "Stream"}
