"""The callback handler: its ``on_...`` methods clear the flags and may be overridden, and its list may be edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.trainer import EarlyStoppingCallback, Trainer, TrainerCallback
from echelon.trainer.callbacks.callback_handler import CallbackHandler, DefaultFlowCallback
from echelon.trainer.state import ExportableState, TrainerControl, TrainerState
from tests.trainer_models import DATA, Line, arguments


class _Counts(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append("step")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append("log")


def test_edits_of_the_list_of_callbacks_take_effect() -> None:
    handler = CallbackHandler([DefaultFlowCallback, first := _Counts()], None, None, None, None)
    control = TrainerControl()
    handler.on_log({}, {}, control, {})
    second = _Counts()
    handler.callbacks.append(second)
    handler.on_log({}, {}, control, {})
    handler.callbacks.remove(first)
    handler.on_log({}, {}, control, {})
    handler.callbacks[1] = third = _Counts()
    handler.on_log({}, {}, control, {})
    handler.callbacks = [first]
    handler.on_log({}, {}, control, {})
    assert [len(one.seen) for one in (first, second, third)] == [3, 2, 1]


def test_a_handler_of_the_user_s_gets_every_event_of_the_trainer(tmp_path: Path) -> None:
    class Handler(CallbackHandler):
        events: list[str] = []

        def call_event(self, event: str, *args: Any, **kwargs: Any) -> Any:
            self.events.append(event)
            return super().call_event(event, *args, **kwargs)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> Any:
            self.events.append("override")
            return super().on_step_begin(*args, **kwargs)

    trainer = Trainer(Line(), arguments(tmp_path, max_steps=2), train_dataset=DATA)
    old = trainer.callback_handler
    trainer.callback_handler = Handler(old.callbacks, old.model, None, None, None)
    trainer.train()
    events = Handler.events
    assert events.count("override") == events.count("on_step_begin") == events.count("on_step_end") == 2
    assert events[0] == "on_train_begin"
    assert events[-1] == "on_train_end"


def test_call_event_clears_no_flag() -> None:
    handler = CallbackHandler([DefaultFlowCallback], None, None, None, None)
    control = TrainerControl(True, True, True, True, True)
    assert vars(handler.call_event("on_log", {}, {}, control, logs={})) == vars(  # type: ignore[arg-type]
        TrainerControl(True, True, True, True, True)
    )


def test_a_missing_flow_and_a_second_callback_of_a_class_are_told(caplog: pytest.LogCaptureFixture) -> None:
    handler = CallbackHandler([_Counts], None, None, None, None)
    assert "DefaultFlowCallback is not among the callbacks (_Counts)" in caplog.text
    with pytest.warns(UserWarning, match="a _Counts has already been added"):
        handler.add_callback(_Counts)
    assert handler.callback_list == "_Counts\n_Counts"


def test_callbacks_are_removed_by_their_base_class_too() -> None:
    class Mine(_Counts):
        pass

    handler = CallbackHandler([DefaultFlowCallback, Mine], None, None, None, None)
    assert isinstance(handler.pop_callback(_Counts), Mine)
    assert handler.pop_callback(_Counts) is None


def test_another_rule_of_early_stopping_is_used() -> None:
    class Never(EarlyStoppingCallback):
        def check_metric_value(self, args: Any, state: Any, control: Any, metric_value: float) -> None:
            self.values = [*getattr(self, "values", []), metric_value]

    class Args:
        metric_for_best_model = "loss"
        greater_is_better = False

    callback, control = Never(), TrainerControl()
    callback.on_evaluate(Args, TrainerState(best_metric=0.0), control, {"eval_loss": 3.0})
    assert callback.values == [3.0]
    assert not control.should_training_stop
    copy = Never.from_state(callback.state())
    assert isinstance(copy, ExportableState)
    assert copy.early_stopping_patience == callback.early_stopping_patience


def test_early_stopping_and_the_best_model_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    args = arguments(tmp_path, max_steps=9, learning_rate=0.0, load_best_model_at_end=True, **steps)
    Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[EarlyStoppingCallback(2)]).train()
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert (
        "early stopping ends the training at step 3: eval_loss has not improved on 114.0 in the last 2 evaluation(s)"
        in said
    )
    assert f"the model now has the weights of the best checkpoint: {tmp_path / 'checkpoint-1'} (loss 114.0)" in said


def test_a_state_takes_a_list_of_callbacks() -> None:
    stopping = EarlyStoppingCallback(3)
    state = TrainerState(stateful_callbacks=[TrainerControl(), stopping], log_history=None)  # type: ignore[arg-type]
    assert state.stateful_callbacks["EarlyStoppingCallback"] == stopping.state()
    assert state.log_history == []


@pytest.mark.parametrize("method", ["on_optimizer_step", "call_event"])
def test_a_method_that_is_set_on_the_handler_is_called(method: str, tmp_path: Path) -> None:
    trainer = Trainer(Line(), arguments(tmp_path, max_steps=2), train_dataset=DATA)
    calls: list[str] = []
    old = getattr(trainer.callback_handler, method)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        return old(*args, **kwargs)

    setattr(trainer.callback_handler, method, replaced)
    trainer.train()
    assert len(calls) >= 2
