"""Trackers: tensorboard, wandb, and a custom one."""

import os

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from show import show
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class MyTracker(GeneralTracker):
    name = "mine"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self):
        super().__init__()
        self.notes = []

    @property
    def tracker(self):
        return self.notes

    def start(self):
        self.notes.append("start")

    def store_init_configuration(self, values):
        self.notes.append(["config", values])

    def log(self, values, step=None, **kwargs):
        self.notes.append(["log", values, step, kwargs])

    def finish(self):
        self.notes.append("finish")


mine = MyTracker()
accelerator = Accelerator(log_with=["tensorboard", "wandb", mine], project_dir="logs")
accelerator.init_trackers(
    "tour",
    config={"lr": 0.1, "layers": 2, "name": "small", "deep": True},
    init_kwargs={"tensorboard": {"flush_secs": 1}, "wandb": {"tags": ["side by side"], "mode": "offline"}},
)
for step in range(3):
    accelerator.log({"loss": 1.0 / (step + 1)}, step=step, log_kwargs={"mine": {"note": "hello"}})
accelerator.log({"accuracy": 0.5})
if accelerator.is_main_process:
    show("names", [tracker.name for tracker in accelerator.trackers])
    run = accelerator.get_tracker("wandb", unwrap=True)
    show("wandb options", run.options)
    show("wandb config", run.config)
accelerator.end_training()
show("mine", mine.notes)
if accelerator.is_main_process:
    show("wandb history", run.history)
    show("wandb finished", run.finished)
    events = EventAccumulator("logs/tour").Reload()
    show("tensorboard loss", [(event.step, event.value) for event in events.Scalars("loss")])
    show("hparams file", sorted(name for _, _, names in os.walk("logs") for name in names if name == "hparams.yml"))
