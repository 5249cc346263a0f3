"""Provides the names in ``accelerate.tracking``, implemented by echelon."""

from echelon.trackers import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    AimTracker as AimTracker,
    ClearMLTracker as ClearMLTracker,
    CometMLTracker as CometMLTracker,
    DVCLiveTracker as DVCLiveTracker,
    GeneralTracker as GeneralTracker,
    MLflowTracker as MLflowTracker,
    SwanLabTracker as SwanLabTracker,
    TensorBoardTracker as TensorBoardTracker,
    TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
    filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers,
    on_main_process as on_main_process,
    register_tracker_class as register_tracker_class,
)
