"""What a recording says about a script: its updates and micro-steps, gradients, clipping, optimizer steps and saved states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.distributed.checks.sketch import Sketch, sketch_of
from echelon.verify.parts import record_everything
from echelon.verify.recording import recording
from echelon.verify.trace import (
    Clip,
    Event,
    Model,
    OptimizerStep,
    RecordingSettings,
    SketchedTensors,
    read_trace,
)


def _record(folder: Path, script: Callable[[], Any], *, steps: int = 2) -> list[Event]:
    with recording(folder, RecordingSettings(steps=steps), rank=0) as one:
        record_everything(one)
        script()
    return read_trace(folder).ranks[0]


def _of(events: list[Event], kind: type, **where: Any) -> list[Any]:
    return [e for e in events if isinstance(e, kind) and all(getattr(e, n) == v for n, v in where.items())]


def _named(event: Any) -> dict[str, Sketch]:
    return dict(zip(event.names, event.sketches, strict=True))


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _batch(number: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(number))


def test_recording_ends_the_script_after_its_updates_and_leaves_no_patch(tmp_path: Path) -> None:
    patched: list[tuple[Any, str]] = [
        (nn.Module, "__call__"),
        (torch.autograd, "backward"),
        (nn.utils, "clip_grad_norm_"),
        (torch.amp.GradScaler, "step"),
        (torch.optim.Optimizer, "__init__"),
        (torch, "save"),
        (torch, "load"),
        (nn.Module, "load_state_dict"),
    ]
    before = [getattr(*one) for one in patched]
    ran: list[int] = []

    def script() -> None:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            for micro_step in range(2):
                model(_batch(micro_step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ran.append(step)

    events = _record(tmp_path, script)
    assert ran == [0, 1]
    assert [getattr(*one) for one in patched] == before
    assert [(e.update, e.micro_step) for e in _of(events, SketchedTensors, content="local")] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [e.update for e in _of(events, SketchedTensors, content="weights")] == [-1, 0, 1]
    assert [e.update for e in _of(events, SketchedTensors, content="buffers")] == [-1, 0, 1]
    assert [e.update for e in _of(events, OptimizerStep)] == [0, 1]


def test_a_script_that_ends_earlier_is_recorded_to_its_end(tmp_path: Path) -> None:
    def script() -> None:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(_batch(0)).sum().backward()
        optimizer.step()
        model.eval()
        model(_batch(1))  # no training pass, so no update

    events = _record(tmp_path, script)
    assert [e.update for e in _of(events, SketchedTensors, content="weights")] == [-1, 0]


def test_an_evaluation_between_updates_is_not_a_part_of_them(tmp_path: Path) -> None:
    def script() -> None:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model.train()
            optimizer.zero_grad()
            loss = model(_batch(step)).sum()
            with torch.no_grad():
                model.eval()
                model(_batch(99))
            loss.backward()
            optimizer.step()

    events = _record(tmp_path, script)
    assert len(_of(events, SketchedTensors, content="local")) == 2
    assert [e.update for e in _of(events, SketchedTensors, content="weights")] == [-1, 0, 1]


def test_two_optimizers_after_one_backward_are_one_update(tmp_path: Path) -> None:
    def script() -> None:
        first, second = nn.Linear(3, 4), nn.Linear(4, 2)
        optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.2)]
        for step in range(3):
            second(first(_batch(step))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    events = _record(tmp_path, script)
    assert [e.parameters for e in _of(events, Model)] == [["weight", "bias"], ["weight", "bias"]]
    steps = _of(events, OptimizerStep)
    assert [(e.update, e.lrs) for e in steps] == [(0, [0.1]), (0, [0.2]), (1, [0.1]), (1, [0.2])]
    assert steps[1].group_of == {"1:weight": 0, "1:bias": 0}
    assert [e.names for e in _of(events, SketchedTensors, content="reduced", update=1)] == [
        ["0:weight", "0:bias"],
        ["1:weight", "1:bias"],
    ]
    state = _of(events, SketchedTensors, content="optimizer_state", update=1)[1]
    assert _named(state)["1:bias/step"].norm == 2.0


def test_two_models_that_alternate_are_two_updates(tmp_path: Path) -> None:
    def script() -> None:
        models = nn.Linear(3, 4), nn.Linear(3, 2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(4):
            model, optimizer = models[step % 2], optimizers[step % 2]
            model(_batch(step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    events = _record(tmp_path, script, steps=3)
    local, weights = (
        [(e.update, e.names[0]) for e in _of(events, SketchedTensors, content=content)]
        for content in ("local", "weights")
    )
    assert local == [(0, "0:weight"), (1, "1:weight"), (2, "0:weight")]
    assert weights == [(-1, "0:weight"), *((update, f"{model}:weight") for update in range(3) for model in range(2))]


@pytest.mark.parametrize("unscales", [True, False])
def test_gradients_are_recorded_without_the_loss_scale_and_skipped_steps_as_such(
    tmp_path: Path, unscales: bool
) -> None:
    model = nn.Linear(3, 2, bias=False)
    plain = nn.Linear(3, 2, bias=False)
    plain.load_state_dict(model.state_dict())

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            scale = float("inf") if step == 0 else 1.0
            scaler.scale(model(_batch(step)).sum() * scale).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    events = _record(tmp_path, script)
    assert [(e.update, e.is_skipped) for e in _of(events, OptimizerStep)] == [(0, True), (1, False)]
    plain(_batch(1)).sum().backward()
    assert plain.weight.grad is not None
    expected = sketch_of(plain.weight.grad)
    for stage in ("local", "reduced"):
        (event,) = _of(events, SketchedTensors, content=stage, update=1)
        assert event.sketches[0].bits == expected.bits, stage  # the scale is a power of 2
    clipped = _of(events, SketchedTensors, content="clipped", update=1)
    assert len(clipped) == unscales
    if unscales:
        assert clipped[0].sketches[0].norm == pytest.approx(0.5, rel=1e-5)
    first, second = _of(events, SketchedTensors, content="weights")[:2]
    assert first.sketches[0].bits == second.sketches[0].bits


@pytest.mark.parametrize("change", ["none", "one element", "sign of a zero"])
def test_a_large_gradient_that_changes_after_the_backward_pass_is_summarized_again(change: str, tmp_path: Path) -> None:
    model = nn.Linear(100, 60)
    gradients = []

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 100) * (torch.arange(100) > 0)).sum().backward()  # zeros in column 0
            gradient = model.weight.grad
            assert gradient is not None
            if change == "one element":
                gradient[59, 99] += 1
            elif change == "sign of a zero":
                gradient[0, 0] = -gradient[0, 0]
            gradients.append(gradient.clone())
            optimizer.step()
            optimizer.zero_grad()

    events = _record(tmp_path, script, steps=1)
    local, reduced = (
        _named(_of(events, SketchedTensors, content=stage, update=0)[0]) for stage in ("local", "reduced")
    )
    assert reduced["0:weight"].bits == sketch_of(gradients[0]).bits
    assert (local["0:weight"].bits == reduced["0:weight"].bits) == (change == "none")
    assert local["0:bias"].bits == reduced["0:bias"].bits


def test_the_state_of_large_tensors_is_summarized_in_turns(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(100, 2))
    copies: list[dict[str, torch.Tensor]] = []

    def script() -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(11):
            model(torch.randn(4, 100, generator=torch.Generator().manual_seed(number))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {name: optimizer.state[one] for name, one in model.named_parameters()}
            copies.append({f"0:{name}/{key}": one[key].clone() for name, one in state.items() for key in one})

    events = _record(tmp_path, script, steps=10)
    recorded = [_named(event) for event in _of(events, SketchedTensors, content="optimizer_state")]
    assert len(recorded) == 10
    large = {f"0:{layer}.weight/{key}" for layer in (0, 1) for key in ("exp_avg", "exp_avg_sq")}
    small = copies[0].keys() - large
    assert "0:2.weight/exp_avg" in small
    updates_of = {name: [update for update, one in enumerate(recorded) if name in one] for name in copies[0]}
    assert all(updates_of[name] == list(range(10)) for name in small)
    for name in large:
        assert {0, 1, 9} <= set(updates_of[name])
        assert [sum(first <= update < first + 4 for update in updates_of[name]) for first in range(2, 6)] == [1] * 4
    for update, one in enumerate(recorded):
        assert {name: sketch.bits for name, sketch in one.items()} == {
            name: sketch_of(copies[update][name]).bits for name in one
        }


def test_the_norm_of_an_unfinished_update_is_no_clipping(tmp_path: Path) -> None:
    """In the exact modes, clip_grad_norm_() computes the norm so far in each micro-step, and clips in the last one."""

    def script() -> None:
        accelerator = Accelerator(cpu=True, parity="exact", max_micro_batch_size=1)
        model = nn.Linear(3, 1)
        loader = DataLoader(TensorDataset(_batch(0)[:4]), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    clips = _of(_record(tmp_path, script), Clip)
    assert [(clip.update, clip.max_norm) for clip in clips] == [(0, 1.0), (1, 1.0)]


def test_clipping_is_seen_however_it_is_called(tmp_path: Path) -> None:
    def script() -> None:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            (100 * model(_batch(step)).square().sum()).backward()
            if step == 0:
                clip_grad_norm_(model.parameters(), max_norm=1.0)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.25)
            optimizer.step()

    events = _record(tmp_path, script)
    norm, value = _of(events, Clip)
    assert norm.max_norm == 1.0
    (reduced,) = _of(events, SketchedTensors, content="reduced", update=0)
    assert norm.norm == pytest.approx(sum(s.square_sum for s in reduced.sketches) ** 0.5, rel=1e-5)
    (clipped,) = _of(events, SketchedTensors, content="clipped", update=0)
    assert sum(s.square_sum for s in clipped.sketches) == pytest.approx(1.0, rel=1e-4)
    assert value.max_norm == 0.25
    assert Path(norm.line.split(":")[0]).name == Path(__file__).name


def test_a_checkpointed_block_and_several_losses(tmp_path: Path) -> None:
    model, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    plain.load_state_dict(model.state_dict())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):  # each reentrant block adds its part of the gradient on its own
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    def script() -> None:
        wrapped = Checkpointed()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(2):
            wrapped(_batch(step).requires_grad_()).sum().backward()
            optimizer.step()

    events = _record(tmp_path, script, steps=1)
    plain(plain(_batch(0))).sum().backward()
    (local,) = _of(events, SketchedTensors, content="local")
    found = _named(local)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        # float32, sums of at most 30 products
        assert found[f"0:layer.{name}"].distance(sketch_of(parameter.grad)) <= 1e-6 * float(parameter.grad.norm())
    assert len(_of(events, Model)) == 1


def test_lbfgs_computes_its_gradients_inside_the_step(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for _ in range(3):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(_batch(0)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    events = _record(tmp_path, script)
    assert [e.update for e in _of(events, OptimizerStep)] == [0, 1]
    assert [e.update for e in _of(events, SketchedTensors, content="reduced")] == [0, 1]
    assert len(_of(events, SketchedTensors, content="local", update=0)) > 1


def test_averaged_weights_are_recorded_with_the_buffers(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Linear(3, 2, bias=False)
        averaged = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(_batch(step)).sum().backward()
            optimizer.step()
            averaged.update_parameters(model)

    events = _record(tmp_path, script)
    (weights,) = _of(events, SketchedTensors, content="weights", update=0)
    (buffers,) = _of(events, SketchedTensors, content="buffers", update=0)
    assert _named(buffers)["0:averaged.weight"].bits == _named(weights)["0:weight"].bits


@pytest.mark.parametrize("is_frozen", [True, False])
def test_an_average_of_the_weights_by_hand_is_recorded_with_the_buffers(is_frozen: bool, tmp_path: Path) -> None:
    """It has the parameters of the model and is not trained; modules of another shape and losses are no copies."""

    def script() -> None:
        model = nn.Linear(3, 2, bias=False)
        copy, other = nn.Linear(3, 2, bias=False), nn.Linear(3, 5)
        copy.requires_grad_(not is_frozen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with torch.no_grad():
                other(copy(_batch(step))[:, [0, 0, 0]])
            nn.MSELoss()(model(_batch(step)), torch.zeros(5, 2)).backward()
            optimizer.step()
            with torch.no_grad():
                copy.weight.copy_(model.weight)

    events = _record(tmp_path, script)
    for update in (0, 1):
        weights, buffers = (
            _of(events, SketchedTensors, content=content, update=update) for content in ("weights", "buffers")
        )
        if update:  # the copy was called before the model was known
            assert list(_named(buffers[0])) == ["0:averaged.weight"]
            assert _named(buffers[0])["0:averaged.weight"].bits == _named(weights[0])["0:weight"].bits


def test_a_saved_state_is_found_again_when_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"

    def script(*, is_resumed: bool, forgets: bool = False) -> None:
        model = _net(seed=int(is_resumed))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if is_resumed:
            state = torch.load(file, weights_only=True)
            model.load_state_dict(state["model"])
            if not forgets:
                optimizer.load_state_dict(state["optimizer"])
        for step in range(4):
            model(_batch(step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and not is_resumed:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                torch.save({"unrelated": torch.ones(3)}, tmp_path / "other.pt")

    events = _record(tmp_path / "first", lambda: script(is_resumed=False), steps=3)
    (saved,) = _of(events, SketchedTensors, content="saved")
    assert (saved.update, saved.path) == (1, str(file))
    for forgets in (False, True):
        folder = tmp_path / f"second {forgets}"
        with recording(folder, RecordingSettings(steps=1, first_update=2), rank=0) as one:
            record_everything(one)
            script(is_resumed=True, forgets=forgets)
        (loaded,) = _of(read_trace(folder).ranks[0], SketchedTensors, content="loaded")
        assert (loaded.update, loaded.path) == (1, str(file))
        assert (_named(loaded).keys() == _named(saved).keys()) != forgets
        same = {name for name, sketch in _named(loaded).items() if sketch.bits == _named(saved)[name].bits}
        assert {"0:0.weight", "buffer 0:1.running_mean", "lr 0"} <= same
        assert ("0:0.weight/exp_avg" in same) != forgets
