"""The step of an unprepared optimizer never uses unreduced gradients, and is reported."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings, marked_lines
from tests.reference import gaussian, mean_square, tanh_net, train_updates

STEPS, MICRO = 4, 2
Said = list[tuple[str, str]]


def _model() -> nn.Module:
    return tanh_net(6, 5, 1)


def _batches(world_size: int) -> torch.Tensor:
    """Of all ranks: [steps, micro-steps, ranks, samples, features]."""
    return gaussian(STEPS, MICRO, world_size, 4, 6)


def _mine() -> torch.Tensor:
    """Of this rank: [steps, micro-steps, samples, features]."""
    return _batches(dist.get_world_size())[:, :, dist.get_rank()]


def _plain(updates: Any, optimizer_of: Callable[..., torch.optim.Optimizer], factor: float = 1.0) -> list[torch.Tensor]:
    model = _model()
    optimizer = optimizer_of(model.parameters(), lr=0.1)
    return train_updates(model, lambda x: mean_square(model(x)) * factor, updates, optimizer).weights


def _stepped_in_each_micro_step(world_size: int) -> list[torch.Tensor]:
    """What an optimizer does that steps in each micro-step with the ranks' mean gradient."""
    return _plain(_batches(world_size).flatten(0, 1), torch.optim.AdamW, factor=1 / MICRO)


def _ours(caught: list[warnings.WarningMessage]) -> Said:
    return [(str(w.message), f"{Path(w.filename).name}:{w.lineno}") for w in caught if w.category is EchelonWarning]


def _weights(accelerator: Accelerator, model: Any) -> list[torch.Tensor] | None:
    whole = accelerator.get_state_dict(model)
    return None if whole is None else [value.cpu() for value in whole.values()]


def _never_prepared(engine: str, form: str) -> tuple[list[torch.Tensor] | None, Said]:
    accelerator = Accelerator(gradient_accumulation_steps=MICRO, engine=engine)
    model: Any = _model()
    if form == "the one that was given":
        given = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, _prepared = accelerator.prepare(model, given)
        optimizer = given
    elif form == "the one inside":
        model, prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        optimizer = prepared.optimizer
    else:
        model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with all_warnings() as caught:
        for x in _mine().flatten(0, 1):
            with accelerator.accumulate(model):
                accelerator.backward(mean_square(model(x)))
                optimizer.step()  # LINE
                optimizer.zero_grad()
    return _weights(accelerator, model), _ours(caught)


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["made after prepare", "the one that was given", "the one inside"])
@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_gradients_are_averaged_first_and_the_line_is_named_once(engine: str, form: str) -> None:
    """float64, 8 steps of AdamW, whose division enlarges rounding: 1e-9."""
    if (engine, form) == ("fsdp2", "the one that was given"):
        pytest.skip("fsdp2 gives that one the sharded parameters: it is the one inside")
    results = run_on_ranks(_never_prepared, engine, form, world_size=2)
    expected = _stepped_in_each_micro_step(2)
    for weights, _ in results:
        for weight, right in zip(weights or (), expected):
            torch.testing.assert_close(weight, right, rtol=1e-9, atol=1e-9)
    (said, *more), silent = results[0][1], results[1][1]
    assert (more, silent) == ([], [])
    text, line = said
    is_inside = form == "the one inside" or (form == "the one that was given" and engine == "ddp")
    assert ("was stepped directly" if is_inside else "AdamW was not prepared") in text
    assert "window (2 micro-steps)" in text
    assert "averages" in text
    assert ("save_state() does not save its state" in text) is not is_inside
    assert line in marked_lines(__file__, "LINE")


def test_a_step_within_an_update_of_one_process_warns() -> None:
    """Nothing is to be averaged there; the weights are those of a loop that steps in each micro-step. float64: 1e-9."""
    ((weights, said),) = run_on_ranks(_never_prepared, "single", "made after prepare", world_size=1)
    for weight, right in zip(weights or (), _stepped_in_each_micro_step(1)):
        torch.testing.assert_close(weight, right, rtol=1e-9, atol=1e-9)
    ((text, line),) = said
    assert "its step() is not postponed to the end of the accumulation window (2 micro-steps)" in text
    assert "averaged" not in text
    assert line in marked_lines(__file__, "LINE")


def _that_got_more_parameters() -> list[torch.Tensor]:
    """It has stepped a model of nobody's before it is given the prepared one's parameters."""
    accelerator = Accelerator()
    bare, other = _model(), _model()
    accelerator.prepare(bare)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    first, second = _mine()[0]
    mean_square(other(first)).backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(bare.parameters())})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        mean_square(bare(second)).backward()
        optimizer.step()
    return [p.detach() for p in bare.parameters()]


def test_an_optimizer_that_receives_prepared_parameters_later_is_detected() -> None:
    """One step of SGD with the mean gradient; float64: 1e-12."""
    expected = _plain(_batches(2)[0, 1:], torch.optim.SGD)
    for weights in run_on_ranks(_that_got_more_parameters, world_size=2):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


# ---- where it cannot be made right ----------------------------------------------------------------------------------


def _refused(form: str) -> str:
    """Return the text of the error; each step is on a line of its own."""
    options: dict[str, Any] = {}
    if form in ("exact", "bitwise"):
        options = {"parity": form, "seed": 0}
    if form.startswith("fp16"):
        options = {"mixed_precision": "fp16", "cpu": True}
    if form == "made before prepare":
        options = {"engine": "fsdp2"}
    accelerator = Accelerator(**options)
    bare = _model().float()
    before = torch.optim.SGD(bare.parameters(), lr=0.1)
    model: Any = accelerator.prepare(bare)
    optimizer = before if form == "made before prepare" else torch.optim.SGD(bare.parameters(), lr=0.1)
    if form == "in the backward pass":
        for p in bare.parameters():
            p.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loader: Any = accelerator.prepare(DataLoader(torch.ones(32, 6), batch_size=8))  # type: ignore[arg-type]
    for x in loader:
        try:
            accelerator.backward(mean_square(model(x)))
            optimizer.step()  # REFUSED
        except UsageError as error:
            return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("form", "world_size", "said"),
    [
        ("exact", 1, "neither counted nor saved"),
        ("exact", 2, "neither counted nor saved"),
        ("bitwise", 2, "not postponed to the end of an update"),
        ("fp16", 1, "not been unscaled (fp16 loss scale 65536)"),
        ("fp16", 2, "not been unscaled (fp16 loss scale 65536)"),
        ("in the backward pass", 2, "steps inside the backward pass"),
        ("made before prepare", 2, "that prepare() replaced with sharded ones"),
    ],
)
def test_uncorrectable_steps_are_errors_at_their_line(form: str, world_size: int, said: str) -> None:
    for text in run_on_ranks(_refused, form, world_size=world_size):
        assert said in text
        assert "SGD" in text
        assert "do:" in text
        if form != "in the backward pass":
            assert any(line in text for line in marked_lines(__file__, "REFUSED"))


# ---- what is right, and stays silent ------------------------------------------------------------------------------------


def _silent(form: str) -> int:
    """Return the number of warnings; ranks must agree where they train together."""
    options: dict[str, Any] = {"mixed_precision": "fp16", "cpu": True} if form.startswith("fp16") else {}
    accelerator = Accelerator(**options)
    bare = _model().float()
    model, prepared = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    other = _model().float()  # of nobody
    optimizer = torch.optim.SGD(other.parameters() if form == "another model" else bare.parameters(), lr=0.1)
    with all_warnings() as caught:
        for x in _mine().float().flatten(0, 1):
            if form == "another model":
                with accelerator.no_sync(model):
                    mean_square(other(x)).backward()
                    optimizer.step()
                optimizer.zero_grad()
            elif form == "on purpose":
                with accelerator.no_sync(model, unsynced=True):
                    accelerator.backward(mean_square(model(x)))
                    optimizer.step()
                optimizer.zero_grad()
            elif form == "fp16, by its scaler":
                assert accelerator.scaler is not None
                accelerator.backward(mean_square(model(x)))
                accelerator.scaler.step(optimizer)
                accelerator.scaler.update()
                optimizer.zero_grad()
            elif form == "two Accelerators":
                second = Accelerator(gradient_accumulation_steps=2)
                with second.accumulate():
                    accelerator.backward(mean_square(model(x)))
                    prepared.step()
                    prepared.zero_grad()
            else:
                accelerator.backward(mean_square(model(x)))
                optimizer.step()
                optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in bare.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    assert torch.equal(everywhere[0], everywhere[1]) is (form != "on purpose")
    return len(caught)


@pytest.mark.parametrize(
    "form", ["reduced gradients", "another model", "on purpose", "fp16, by its scaler", "two Accelerators"]
)
def test_correct_steps_do_not_warn(form: str) -> None:
    assert run_on_ranks(_silent, form, world_size=2) == [0, 0]


def _closure(prepared: bool) -> list[torch.Tensor]:
    """The gradients are made inside step(), through the bare module."""
    accelerator = Accelerator()
    bare = _model()
    if prepared:
        _, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    else:
        accelerator.prepare(bare)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        for x in _mine().flatten(0, 1):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mean_square(bare(x))
                accelerator.backward(loss)
                return loss

            optimizer.step(closure)
    return [p.detach() for p in bare.parameters()]


@pytest.mark.parametrize("prepared", [False, True])
def test_gradients_computed_by_a_closure_are_averaged(prepared: bool) -> None:
    """float64, SGD: 1e-12."""
    expected = _plain(_batches(2).flatten(0, 1), torch.optim.SGD)
    for weights in run_on_ranks(_closure, prepared, world_size=2):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def _lbfgs(prepared: bool) -> tuple[list[torch.Tensor], int]:
    accelerator = Accelerator()
    bare = _model()
    given = torch.optim.LBFGS(bare.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    model, stepped = accelerator.prepare(bare, given)
    optimizer: Any = stepped if prepared else given
    x = _mine()[0, 0]
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_square(model(x))
        accelerator.backward(loss)
        calls.append(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return [p.detach() for p in bare.parameters()], len(calls)


@pytest.mark.parametrize("prepared", [False, True])
def test_an_optimizer_that_uses_the_loss_behaves_equally_on_all_ranks(prepared: bool) -> None:
    """Against plain PyTorch: float64, sums in another order, through 3 x 20 iterations of a line search: 1e-6."""
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([mean_square(model(x)) for x in _batches(2)[0, 0]]).mean()
        loss.backward()
        calls.append(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]
    for weights, num_calls in run_on_ranks(_lbfgs, prepared, world_size=2):
        assert num_calls == len(calls)
        torch.testing.assert_close(weights, [p.detach() for p in model.parameters()], rtol=1e-6, atol=1e-6)


# ---- gradients that are cleared in the middle of an update ----------------------------------------------------------------


def _cleared(parity: str, form: str) -> tuple[list[torch.Tensor], str]:
    options: dict[str, Any] = {"max_micro_batch_size": 2} if parity == "exact" else {"canonical_shards": 4}
    accelerator = Accelerator(cpu=True, parity=parity, seed=0, **options)
    bare = _model()
    loader: Any = DataLoader(_batches(2).flatten(0, 3), batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1), loader)
    try:
        for x in loader:
            if form == "model.zero_grad() first":
                model.zero_grad()
            elif form == "optimizer.zero_grad() first":
                optimizer.zero_grad()
            accelerator.backward(mean_square(model(x)))
            if form == "torch's clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            if form == "model.zero_grad() last":
                model.zero_grad(set_to_none=False)
            elif "first" not in form:
                optimizer.zero_grad()
    except UsageError as error:
        return [], str(error)
    return [p.detach() for p in bare.parameters()], ""


@pytest.mark.parametrize("parity", ["exact", "bitwise"])
@pytest.mark.parametrize(
    "form",
    ["optimizer.zero_grad() first", "model.zero_grad() first", "model.zero_grad() last", "torch's clipping", "plain"],
)
def test_gradients_of_earlier_micro_steps_are_kept_or_losing_them_is_an_error(parity: str, form: str) -> None:
    """Against a plain loop: float64, SGD: 1e-12."""
    expected = _plain(_batches(2).flatten(0, 3).view(-1, 1, 8, 6), torch.optim.SGD)
    for weights, text in run_on_ranks(_cleared, parity, form, world_size=2):
        assert weights or "earlier micro-steps' gradients were cleared" in text
        assert ("optimizer" in form or form == "plain") <= bool(weights)
        torch.testing.assert_close(weights, expected if weights else [], rtol=1e-12, atol=1e-12)


# ---- a model that was not prepared ----------------------------------------------------------------------------------


def _without_prepare(form: str) -> Said:
    accelerator = Accelerator()
    model: Any = _model()
    if form == "DDP by hand":
        model = nn.parallel.DistributedDataParallel(model)
    if form == "prepared":
        model = accelerator.prepare(model)
    with all_warnings() as caught:
        for x in _mine()[0]:
            accelerator.backward(mean_square(model(x)))  # BARE
    return _ours(caught)


def test_a_backward_pass_without_a_prepared_model_is_named_once() -> None:
    (said, *more), silent = run_on_ranks(_without_prepare, "bare", world_size=2)
    assert (more, silent) == ([], [])
    assert said[1] in marked_lines(__file__, "BARE")
    assert "Write model = accelerator.prepare(model)" in said[0]


def _only_optimizer_prepared(engine: str, parity: str, has_second_model: bool) -> tuple[list[torch.Tensor], Said]:
    accelerator = Accelerator(engine=engine, parity=parity)
    model, second = _model(), _model() if has_second_model else None
    loader = DataLoader(list(_batches(2).flatten(0, 3)), batch_size=8)  # type: ignore[arg-type]
    with all_warnings() as caught:
        optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for x in loader:
            optimizer.zero_grad()
            loss = mean_square(model(x)) + (mean_square(second(x)) if second is not None else 0)
            accelerator.backward(loss)  # ALONE
            optimizer.step()  # OPTIMIZER ONLY
    return [p.detach() for p in model.parameters()], _ours(caught)


@pytest.mark.parametrize(("engine", "parity"), [("ddp", "exact"), ("zero1", "exact"), ("fsdp2", "off")])
def test_a_prepared_optimizer_of_an_unprepared_model_gives_one_true_warning(engine: str, parity: str) -> None:
    """In exact mode, the weights are a plain loop's (float64, SGD: 1e-12); fsdp2 averages nothing, and says so."""
    (weights, said), (others, silent) = run_on_ranks(_only_optimizer_prepared, engine, parity, False, world_size=2)
    assert (len(said), silent) == (1, [])
    text, line = said[0]
    if engine == "fsdp2":
        assert "each process trains a separate model" in text
        assert line in marked_lines(__file__, "ALONE")
        assert not torch.equal(weights[0], others[0])
        return
    assert line in marked_lines(__file__, "OPTIMIZER ONLY")
    assert "averages their gradients across ranks at each step" in text
    assert text.endswith("model, optimizer = accelerator.prepare(model, optimizer)")
    expected = _plain(_batches(2).flatten(0, 3).view(-1, 1, 8, 6), torch.optim.SGD)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def test_a_model_without_a_prepared_optimizer_is_named_beside_one_with_it() -> None:
    (_, said), _ = run_on_ranks(_only_optimizer_prepared, "ddp", "off", True, world_size=2)
    assert [line in marked_lines(__file__, "ALONE") for _, line in said] == [True, False]
    assert "Write second = accelerator.prepare(second)" in said[0][0]


@pytest.mark.parametrize("form", ["DDP by hand", "prepared"])
def test_averaged_gradients_give_no_warning(form: str) -> None:
    assert run_on_ranks(_without_prepare, form, world_size=2) == [[], []]
