"""The line that ``echelon verify`` shows: the user's code that belongs to the stage, also where a Trainer runs the loop."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from echelon.trainer import trainer as trainer_module
from echelon.verify.recorders.user_code import line_of_batch, line_of_loss, line_of_user, lines_of_modules

# What a library's Trainer has in the stack: its training step, which calls backward, and the default loss.
LIBRARY = """
class Trainer:
    compute_loss_func = None
    data_collator = None
    train_dataset = ()

    def __init__(self, model):
        self.model = model

    def train(self, call):
        return self.training_step(call)

    def training_step(self, call):
        return call()

    def compute_loss(self, model, inputs):
        return model(inputs)


class Model:
    def forward(self, x):
        return x
"""
SCRIPT = """
from library import Model, Trainer

class Own(Model):
    def forward(self, x, labels=None):
        loss = None
        if labels is not None:
            loss = (x - labels).mean()  # model
        return loss

class Loss(Trainer):
    def compute_loss(self, model, inputs):
        outputs = model(inputs)
        loss = outputs.mean()  # compute_loss
        return loss

class Step(Trainer):
    def training_step(self, call):
        return super().training_step(call)

class OwnStep(Trainer):
    def training_step(self, call):
        return call()  # own step

def loss_func(outputs, labels):
    return outputs.mean()  # compute_loss_func

def collate(samples):  # collate
    return samples

def train(trainer, call):
    return trainer.train(call)  # train
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's module, of a script that trains with a Trainer whose code is in echelon's folder."""
    library = ModuleType("library")
    exec(compile(LIBRARY, str(Path(trainer_module.__file__).with_name("in_a_test.py")), "exec"), vars(library))
    monkeypatch.setitem(sys.modules, "library", library)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    module = ModuleType("script")
    exec(compile(SCRIPT, str(path), "exec"), vars(module))
    module.library = library  # type: ignore[attr-defined]
    # This file is the user's code, too.
    monkeypatch.setattr("echelon.verify.recorders.user_code._is_in_library", lambda file: file != str(path))
    return module


def _marked(word: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith(f"# {word}"))


@pytest.mark.parametrize(
    ("trainer", "model", "code", "word"),
    [
        ("Loss", "Own", "compute_loss", "compute_loss"),
        ("Trainer", "Own", "model", "model"),
        ("Step", "Own", "model", "model"),
        ("Trainer", "Model", "library", "train"),
        ("OwnStep", "Model", "compute_loss", "own step"),
    ],
)
def test_the_line_of_a_trainers_loss_is_in_the_code_that_computes_it(
    script: Any, trainer: str, model: str, code: str, word: str
) -> None:
    one = getattr(script, trainer)(getattr(script, model)())
    line, found = script.train(one, line_of_loss)
    assert (int(line.rpartition(":")[2]), found) == (_marked(word), code)


def test_a_function_that_is_passed_as_the_loss(script: Any) -> None:
    trainer = script.Trainer(script.Own())
    trainer.compute_loss_func = script.loss_func
    line, code = script.train(trainer, line_of_loss)
    assert (int(line.rpartition(":")[2]), code) == (_marked("compute_loss_func"), "compute_loss_func")


def test_the_line_of_a_trainers_batch_is_the_users_collate_function(script: Any) -> None:
    trainer = script.Trainer(script.Model())

    def number() -> int:
        return int(script.train(trainer, line_of_batch).rpartition(":")[2])

    assert number() == _marked("train")
    trainer.data_collator = script.collate
    assert number() == _marked("collate")


def _backward() -> tuple[str, str]:
    return line_of_loss()


def test_without_a_trainer_the_line_is_the_call_in_the_script() -> None:
    line, code = _backward()
    assert (line, code) == (f"{__file__}:{_backward.__code__.co_firstlineno + 1}", "")
    assert line_of_user().startswith(f"{__file__}:")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        x = self.hidden(x)
        return self.head(x)


def test_each_module_has_the_line_that_calls_it() -> None:
    first = _Net.forward.__code__.co_firstlineno
    assert lines_of_modules(_Net()) == {
        "": f"{__file__}:{first}",
        "hidden": f"{__file__}:{first + 1}",
        "head": f"{__file__}:{first + 2}",
    }
    assert lines_of_modules(nn.Linear(2, 1)) == {}
