"""Experiment trackers: one interface to log files and tracking services."""

from echelon.trackers.aim import AimTracker
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.clearml import ClearMLTracker
from echelon.trackers.comet import CometMLTracker
from echelon.trackers.dvclive import DVCLiveTracker
from echelon.trackers.jsonl import JSONLTracker, read_records
from echelon.trackers.mlflow import MLflowTracker
from echelon.trackers.registry import (
    LOGGER_TYPE_TO_CLASS,
    LoggerType,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from echelon.trackers.tensorboard import TensorBoardTracker
from echelon.trackers.wandb import SwanLabTracker, TrackioTracker, WandBTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLTracker",
    "LoggerType",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "read_records",
    "register_tracker_class",
]
