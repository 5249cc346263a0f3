"""``echelon.ray.run``: runs a training function on the workers of Ray's TorchTrainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from echelon.base.errors import LaunchError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import require
from echelon.base.warnings import warn
from echelon.launch.failures.failure import ErrorRecord, RankEnd, first_failure

if TYPE_CHECKING:
    from ray.train import Result, ScalingConfig

# gloo in addition to NCCL, for objects and CPU tensors.
_BACKEND_OF_GPUS = "cpu:gloo,cuda:nccl"


def run(
    fn: Callable[..., object],
    scaling_config: ScalingConfig | None = None,
    *,
    config: Mapping[str, object] | None = None,
    num_workers: int | None = None,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    **options: Any,
) -> Result:
    """Run ``fn`` on a Ray cluster's workers as one distributed training run, and return Ray's ``Result``.

    Each worker is a rank. ``Accelerator``, ``Trainer`` and ``setup()`` use the process group that Ray creates.
    ``result.return_value`` is what ``fn`` returned on rank 0. Workers run in this process's current directory if it
    exists on their machine.

    Args:
        fn: the training function, called with ``config`` if it is given.
        scaling_config: a Ray ScalingConfig; alternatively, pass ``num_workers``, ``use_gpu`` and
            ``resources_per_worker``.
        config: argument of ``fn``.
        num_workers: number of ranks.
        use_gpu: whether each rank gets a GPU.
        resources_per_worker: as in ``ScalingConfig``.
        options: other arguments for Ray's ``TorchTrainer``: ``run_config``, ``datasets``, ``torch_config``, ...

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: the number of workers was given twice or not at all.
        LaunchError: a worker failed; the message gives its rank and exception.

    Examples:
        >>> result = echelon.ray.run(train, num_workers=2, use_gpu=True)  # doctest: +SKIP
    """
    train = require("ray.train", extra="ray", purpose="echelon.ray.run")
    ray_torch = require("ray.train.torch", extra="ray", purpose="echelon.ray.run")
    if (scaling_config is None) == (num_workers is None):
        given = (
            _("neither a ScalingConfig nor num_workers")
            if num_workers is None
            else _("a ScalingConfig and num_workers")
        )
        raise UsageError(
            _("echelon.ray.run: {given}", given=given),
            where=_("code {name}", name="echelon.ray.run()"),
            do=_("use either run(fn, ScalingConfig(num_workers=2)) or run(fn, num_workers=2)"),
        )
    if scaling_config is None:
        resources = None if resources_per_worker is None else dict(resources_per_worker)
        scaling_config = train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources)
    elif use_gpu or resources_per_worker is not None:
        raise UsageError(
            _("echelon.ray.run: use_gpu and resources_per_worker cannot be combined with a ScalingConfig"),
            where=_("code {name}", name="echelon.ray.run()"),
            do=_("set them in the ScalingConfig"),
        )
    if scaling_config.use_gpu:
        options.setdefault("torch_config", ray_torch.TorchConfig(backend=_BACKEND_OF_GPUS))
    worker = _Worker(fn=fn, config=None if config is None else dict(config), folder=os.getcwd())
    trainer = ray_torch.TorchTrainer(worker.run, scaling_config=scaling_config, **options)
    try:
        result: Result = trainer.fit()
        return result
    except train.TrainingFailedError as error:
        raise _explained(error) from error


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """The state that is sent to each worker."""

    fn: Callable[..., object]
    config: dict[str, object] | None
    folder: str

    def run(self) -> object:
        """Call the user's function in the directory from which the run was started."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)  # Ray runs workers in a folder that it deletes
        else:
            warn(
                _(
                    "{folder} does not exist on this machine, so relative paths are resolved against Ray's directory "
                    "{current}",
                    folder=self.folder,
                    current=os.getcwd(),
                )
            )
        return self.fn() if self.config is None else self.fn(self.config)


def _explained(error: Any) -> LaunchError:
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    ends = [
        RankEnd(rank=rank, exit_code=1, record=ErrorRecord(time_ns=0, type=type(cause).__name__, message=str(cause)))
        for rank, cause in sorted(failures.items())
    ]
    first = first_failure(ends)
    if first is None:
        return LaunchError(
            _("Ray could not run the training function: {error}", error=error),
            where="echelon.ray.run",
            do=_("check the cluster with `ray status`"),
        )
    assert first.record is not None
    others = _("; {number} other ranks also failed", number=len(ends) - 1) if len(ends) > 1 else ""
    return LaunchError(
        _(
            "rank {rank} failed with {type}: {message}{others}",
            rank=first.rank,
            type=first.record.type,
            message=first.record.message,
            others=others,
        ),
        where="echelon.ray.run",
        do=_(
            "fix the error above; to have Ray restart failed workers, pass "
            "RunConfig(failure_config=FailureConfig(max_failures=N))"
        ),
    )
