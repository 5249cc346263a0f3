"""The registry of built-in and custom trackers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import install_command, is_available
from echelon.base.warnings import warn
from echelon.compat.enums import LoggerType
from echelon.trackers.base import GeneralTracker
from echelon.trackers.jsonl import JSONLTracker
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
    "LoggerType",
    "filter_trackers",
    "get_available_trackers",
    "register_tracker_class",
    "tracker_class",
]


_BUILT_IN: Mapping[str, Any] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            AimTracker,
            CometMLTracker,
            MLflowTracker,
            TensorBoardTracker,
            WandBTracker,
            ClearMLTracker,
            DVCLiveTracker,
            SwanLabTracker,
            TrackioTracker,
            JSONLTracker,
        )
    }
)
# In the order of accelerate.
_PACKAGES: Mapping[LoggerType, tuple[str, ...]] = MappingProxyType(
    {
        LoggerType.TENSORBOARD: ("tensorboard", "tensorboardX"),
        LoggerType.WANDB: ("wandb",),
        LoggerType.COMETML: ("comet_ml",),
        LoggerType.AIM: ("aim",),
        LoggerType.MLFLOW: ("mlflow",),
        LoggerType.CLEARML: ("clearml",),
        LoggerType.DVCLIVE: ("dvclive",),
        LoggerType.SWANLAB: ("swanlab",),
        LoggerType.TRACKIO: ("trackio",),
    }
)


class _Classes(Mapping[str, Any]):
    """Read-only mapping from names to tracker classes, including classes registered later."""

    def __getitem__(self, name: str) -> Any:
        return tracker_class(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**_BUILT_IN, **GeneralTracker.registered})

    def __len__(self) -> int:
        return len({**_BUILT_IN, **GeneralTracker.registered})


LOGGER_TYPE_TO_CLASS: Mapping[str, Any] = _Classes()


def tracker_class(name: str) -> Any:
    """Return the tracker class with this ``name``; registered classes take precedence over built-in ones.

    Raises:
        KeyError: no class has this name.
    """
    registered = GeneralTracker.registered
    return registered[name] if name in registered else _BUILT_IN[name]


def get_available_trackers() -> list[LoggerType]:
    """Return the built-in trackers whose library is installed.

    Examples:
        >>> trackers = get_available_trackers()
    """
    return [kind for kind, packages in _PACKAGES.items() if any(map(is_available, packages))]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a custom class, so that ``log_with`` accepts its ``name`` in this process.

    It is instantiated with the project name, the logging directory if it requires one, and its ``init_kwargs``.

    Raises:
        UsageError: the class is not a ``GeneralTracker`` subclass, or lacks ``name`` or ``requires_logging_directory``.

    Examples:
        >>> class PrintTracker(GeneralTracker):
        ...     name = "print"
        ...     requires_logging_directory = False
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> register_tracker_class(PrintTracker)
        >>> accelerator = Accelerator(log_with="print")
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise UsageError(
            f"register_tracker_class() got {tracker_class!r}, which is not a subclass of GeneralTracker",
            do="pass a subclass of GeneralTracker, not an instance",
        )
    for attribute in ("name", "requires_logging_directory"):
        if attribute not in dir(tracker_class) or (attribute == "name" and not tracker_class.name):  # type: ignore[attr-defined]
            raise UsageError(
                f"the tracker class {tracker_class.__name__} has no {attribute!r}",
                do=(
                    f"define the class attribute {attribute} as "
                    f"{'a string' if attribute == 'name' else 'True or False'}"
                ),
            )
    name: str = tracker_class.name  # type: ignore[attr-defined]
    if name in LOGGER_TYPE_TO_CLASS:
        warn(
            _(
                "a tracker named {name!r} is already registered; {tracker_class} replaces it",
                name=name,
                tracker_class=tracker_class.__name__,
            )
        )
    GeneralTracker.registered = MappingProxyType({**GeneralTracker.registered, name: tracker_class})


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None
) -> list[LoggerType | str | GeneralTracker]:
    """Return the trackers in ``log_with`` that are available, without duplicates.

    Args:
        log_with: a name, a ``LoggerType``, a tracker object, or a list of these; ``all`` selects all installed
            trackers and places them after the list's tracker objects. Trackers that are not installed are skipped with a
            warning.
        logging_dir: directory for trackers that write files.

    Raises:
        UsageError: a name is unknown, or ``logging_dir`` is None but a tracker needs it.

    Examples:
        >>> filter_trackers("all", logging_dir="runs")  # doctest: +SKIP
        [<LoggerType.TENSORBOARD: 'tensorboard'>]
    """
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]
    available = get_available_trackers()
    if any(isinstance(one, (str, LoggerType)) and str(one) == "all" for one in wanted):
        found: list[LoggerType | str | GeneralTracker] = [one for one in wanted if isinstance(one, GeneralTracker)]
        return [*found, *(kind for kind in available if logging_dir is not None or not _needs_folder(str(kind)))]
    found = []
    for one in wanted:
        if isinstance(one, GeneralTracker):
            found.append(one)
            continue
        if not isinstance(one, (str, LoggerType)) or str(one) not in LOGGER_TYPE_TO_CLASS:
            raise UsageError(
                _("log_with={one!r} is not a known tracker", one=one),
                where="code Accelerator(log_with=)",
                do=_(
                    "use one of {names}, or a GeneralTracker object",
                    names=", ".join(sorted({*LoggerType.list(), *LOGGER_TYPE_TO_CLASS})),
                ),
            )
        name = str(one)
        kind = LoggerType(name) if name in LoggerType and name not in GeneralTracker.registered else name
        if isinstance(kind, LoggerType) and kind not in available:
            package = _PACKAGES[kind][0]
            warn(_("log_with={name!r}: the package {package!r} is not installed, so nothing is logged to this tracker. "
"{install}", name=name, package=package, install=install_command(name)))  # fmt: skip
            continue
        if _needs_folder(name) and logging_dir is None:
            raise UsageError(
                _("log_with={name!r} needs a logging directory", name=name),
                where="code Accelerator(log_with=)",
                do=_("set Accelerator(project_dir=...) or ProjectConfiguration(logging_dir=...)"),
            )
        if kind not in found:
            found.append(kind)
    return found


def _needs_folder(name: str) -> bool:
    return bool(tracker_class(name).requires_logging_directory)
