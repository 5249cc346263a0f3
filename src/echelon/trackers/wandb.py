"""Weights & Biases; offline with ``init_kwargs={"wandb": {"mode": "offline"}}`` or WANDB_MODE=offline."""

from __future__ import annotations

from typing import Any

from echelon.base.optional import require
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import hide_secrets, plain

__all__ = ["WandBTracker"]


class WandBTracker(GeneralTracker):
    """Logs to a run of ``wandb``.

    Args:
        run_name: the project.
        kwargs: of ``wandb.init``.
    """

    name = "wandb"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        self.run = _wandb().init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The run; None before ``start``."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings in the run's config."""
        self.run.config.update(plain(hide_secrets(values)), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values``; ``kwargs`` are those of ``Run.log``. Tensors of several elements become its histograms."""
        self.run.log(_scalars(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images; ``kwargs`` are those of ``Run.log``."""
        for name, images in values.items():
            self.log({name: [_wandb().Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table of any objects, given as ``columns`` and ``data`` or as ``dataframe``."""
        table = _wandb().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()


def _wandb() -> Any:
    return require("wandb", extra="wandb", purpose="log_with='wandb'")


def _scalars(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(plain(value), list) else plain(value) for name, value in values.items()}
