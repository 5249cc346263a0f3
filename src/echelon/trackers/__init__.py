"""Experiment trackers: one interface to log files and tracking services."""

from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.jsonl import JSONLTracker, read_records
from echelon.trackers.registry import (
    LOGGER_TYPE_TO_CLASS,
    LoggerType,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from echelon.trackers.services import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

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
