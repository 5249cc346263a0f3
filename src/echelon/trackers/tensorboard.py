"""The tracker for TensorBoard."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from echelon.base.optional import is_available, require
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import DroppedValues, flat, hide_secrets, is_number, plain

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(GeneralTracker):
    """Writes to ``<logging_dir>/<run_name>`` with the ``SummaryWriter`` from ``torch.utils.tensorboard`` or
    tensorboardX.

    Args:
        run_name: name for the run and its directory.
        logging_dir: parent directory.
        kwargs: arguments of ``SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs
        self.writer: Any = None
        self._dropped = DroppedValues("TensorBoard")

    @on_main_process
    def start(self) -> None:
        """Open the writer."""
        if is_available("tensorboard") or not is_available("tensorboardX"):
            require("tensorboard", extra="tensorboard", purpose="log_with='tensorboard'")
            module = require("torch.utils.tensorboard", extra="tensorboard", purpose="log_with='tensorboard'")
        else:
            module = require("tensorboardX", extra="tensorboard", purpose="log_with='tensorboard'")
        self.writer = module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``; None before ``start`` and on ranks that do not write."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the settings as hyperparameters and to ``<time>/hparams.yml``.

        In the event file, nested settings get names with slashes, and values other than numbers, strings and booleans
        become strings.
        """
        import yaml  # noqa: PLC0415 - slows down imports

        settings = plain(hide_secrets(values))
        known = {n: v if isinstance(v, (bool, int, float, str)) else str(v) for n, v in flat(settings)}
        self.writer.add_hparams(known, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "hparams.yml").open("w", encoding="utf-8") as file:
            yaml.safe_dump({n: v if _is_yaml(v) else str(v) for n, v in settings.items()}, file)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, strings as text, and dicts of numbers as multiple curves in one chart.

        Args:
            values: values by name.
            step: global step.
            kwargs: arguments for ``add_scalar``, ``add_text`` or ``add_scalars``.
        """
        for name, value in plain(values).items():
            if is_number(value):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self._dropped.warn_once(name, value, "a number, a string or a dict of numbers")
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images; ``kwargs`` are passed to ``add_images``."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the writer."""
        self.writer.close()


def _is_yaml(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and _is_yaml(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_yaml, value))
    return value is None or type(value) in (bool, int, float, str)
