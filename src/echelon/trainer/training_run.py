"""One ``Trainer.train`` call: sets up the data, model, optimizer and checkpoint, and runs the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from echelon.accelerator import AcceleratedScheduler, DummyScheduler
from echelon.accelerator.checkpoint.folders import same_on_all_ranks
from echelon.accelerator.prepare.build_deepspeed import parameters_by_group
from echelon.accelerator.update.scheduler import steps_with_metric
from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.base.warnings import warn
from echelon.trainer.arguments.training_arguments import building_loader
from echelon.trainer.build_accelerator import accumulation_options, data_seed, set_seeds
from echelon.trainer.checkpoint.checkpoint_folders import PREFIX
from echelon.trainer.checkpoint.resume_point import (
    ResumedTraining,
    ResumePoint,
    find_checkpoint,
    saved_arguments,
    saved_batch_size,
)
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.features.auto_find_batch_size import find_batch_size_and_train
from echelon.trainer.features.model_changes import (
    enable_activation_checkpointing,
    inspect_model,
    noisy_embeddings,
    prepare_pipeline,
    set_up_model,
    splits_layers,
)
from echelon.trainer.features.nonfinite import checked_forward
from echelon.trainer.loop import TrainingLoop
from echelon.trainer.optim.optimizers import unwrapped
from echelon.trainer.results import TrainOutput
from echelon.trainer.session import TrainerSession, UpdateSize, global_batch_size
from echelon.trainer.state import TrainerState
from echelon.trainer.trainer_methods import TrainerMethods
from echelon.trainer.training_plan import TrainingPlan, log_plan

__all__ = ["TrainingRun"]

logger = get_logger(__name__)


class TrainingRun:
    """One ``Trainer.train`` call.

    Args:
        trial: a trial's settings as a dict, or an optuna trial.
    """

    def __init__(
        self, trainer: TrainerMethods, session: TrainerSession, *, trial: Any, ignore_keys: list[str] | None
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._trial = trial
        self._ignore_keys = ignore_keys
        self._folder: Path | None = None  # the checkpoint to resume from
        self._start = ResumePoint()
        self._resumed: ResumedTraining | None = None
        self._plan: TrainingPlan | None = None
        self._total = 0  # samples of one update of this process
        self._allows_changed_data = False

    def start(self, resume_from_checkpoint: Any, options: dict[str, Any]) -> TrainOutput:
        """Train from scratch or from a checkpoint.

        Args:
            resume_from_checkpoint: argument of ``Trainer.train``.
            options: the other keyword arguments of ``Trainer.train``.

        Collective: call on every rank.
        """
        trainer, args, accelerator = self._trainer, self._trainer.args, self._trainer.accelerator
        self._allows_changed_data = bool(
            options.pop("allow_changed_data", False)
            or args.allow_changed_data
            or accelerator.config.value.allow_changed_data
        )
        wanted = _checkpoint_argument(resume_from_checkpoint, options)
        trainer._hp_search_setup(self._trial)
        wanted = args.resume_from_checkpoint if wanted is None else wanted
        output_dir = self._session.output_dir(args)
        # Locked before the first step: otherwise a run that cannot save would compute for nothing.
        with (
            contextlib.nullcontext()
            if args.save_strategy == "no"
            else accelerator.checkpoints.store.alone_in(output_dir, prefix=PREFIX)
        ):
            self._folder = find_checkpoint(args, accelerator, output_dir, wanted)
            accumulation = accumulation_options(args).get("num_steps") or args.gradient_accumulation_steps
            self._session.fitted = None
            if accelerator.parity != "off":
                _check_exact(trainer)
                self._set_global_batch_size()
            batch_size = self._session.wanted_batch_size or args.train_batch_size
            self._total = batch_size * accumulation
            if args.auto_find_batch_size and self._folder is not None:
                # The size that fitted into the memory of the saved run, unless the global batch size has changed since.
                saved = saved_batch_size(self._folder)
                if saved is not None and saved < batch_size and self._total % saved == 0:
                    batch_size = saved

            def train(batch_size: int) -> TrainOutput:
                self.set_batch_size(batch_size)
                return trainer._inner_training_loop(
                    batch_size=batch_size,
                    args=args,
                    resume_from_checkpoint=None if self._folder is None else str(self._folder),
                    trial=self._trial,
                    ignore_keys_for_eval=self._ignore_keys,
                )

            self._session.run = self
            try:
                if not args.auto_find_batch_size:
                    return train(batch_size)
                return find_batch_size_and_train(trainer, train, batch_size=batch_size, accumulation=accumulation)
            finally:
                self._session.run = self._session.resumed = self._session.loop = None

    def _set_global_batch_size(self) -> None:
        """Set ``global_batch_size``, if it is not given, from the checkpoint or from the batch size per process."""
        args = self._trainer.args
        if args.global_batch_size is None and self._folder is not None:
            args.global_batch_size = saved_arguments(self._folder).get("global_batch_size")
        args.global_batch_size = global_batch_size(args, self._trainer.accelerator.session.num_readers)

    def set_batch_size(self, batch_size: int) -> None:
        """Implement ``Trainer._update_auto_batch_size``."""
        self._session.fitted = UpdateSize(batch_size, self._total // batch_size)

    def train(
        self,
        batch_size: int | None,
        *,
        resume_from_checkpoint: str | None,
        ignore_keys_for_eval: list[str] | None,
    ) -> TrainOutput:
        """Implement ``Trainer._inner_training_loop``, which an override may call with other arguments."""
        trainer, session = self._trainer, self._session
        args = trainer.args
        if batch_size is not None and args.auto_find_batch_size:
            trainer._update_auto_batch_size(batch_size)
        elif batch_size is not None:
            self.set_batch_size(batch_size)
        if resume_from_checkpoint is None or self._folder is None or Path(resume_from_checkpoint) != self._folder:
            self._folder = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        self._ignore_keys = ignore_keys_for_eval
        trainer.accelerator.dataloader_config.data_seed = data_seed(args)  # a script may have changed args since
        if trainer.model_init is not None:
            set_seeds(args)
            trainer.accelerator.free_memory()
            trainer.model = trainer.model_wrapped = trainer.call_model_init(self._trial)
            trainer.optimizer = trainer.lr_scheduler = None
            set_up_model(trainer)
        session.interface = inspect_model(trainer, before=session.interface)
        trainer.is_in_train = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave)
            session.memory.begin("train")
            if args.activation_checkpointing:
                enable_activation_checkpointing(trainer.model, args.activation_checkpointing_kwargs)
            stack.enter_context(noisy_embeddings(trainer.model, trainer.neftune_noise_alpha))
            if "underflow_overflow" in args.debug:
                stack.enter_context(checked_forward(trainer.model))
            loop = session.loop = self._prepare_loop()
            preemption, is_wanted = trainer.accelerator.preemption, args.save_on_signal or args.enable_jit_checkpoint
            if is_wanted and not stack.enter_context(preemption.during(trainer.accelerator.session.watcher)):
                warn(
                    "save_on_signal has no effect, because the program handles the signals itself or train() does not "
                    "run in the main thread"
                )
            elif args.save_strategy != "no":
                preemption.join()
            try:
                return loop.run()
            except (Exception, KeyboardInterrupt) as error:
                if args.save_on_exception:
                    _save_after_error(error, loop)
                raise

    def _prepare_loop(self) -> TrainingLoop:
        """Prepare the data, state, model and optimizer, load the checkpoint, and return the loop.

        Collective: call on every rank.
        """
        trainer, session = self._trainer, self._session
        if trainer.accelerator.parity == "off":
            loader = trainer.get_train_dataloader()
        else:
            loader = _exact_train_loader(
                trainer, global_batch_size(trainer.args, trainer.accelerator.session.num_readers)
            )
        session.plan = None
        values = trainer.set_initial_training_values(trainer.args, loader)
        if session.plan is None:  # an override did not call super()
            TrainerMethods.set_initial_training_values(trainer, trainer.args, loader)
        assert session.plan is not None
        plan = session.plan.with_initial_values(values)
        session.resumed = self._resumed = None
        session.saved_steps.clear()
        if self._folder is not None:
            session.resumed = self._resumed = ResumedTraining(
                trainer, session, self._folder, allows_changed_data=self._allows_changed_data
            )
            plan = self._resumed.extend_plan(plan)
        self._plan = session.plan = plan
        checkpoint = None if self._folder is None else str(self._folder)
        position = trainer._init_training_state(
            plan.max_steps, plan.steps_per_epoch, plan.num_epochs, checkpoint, self._trial
        )
        if tuple(position) != self._saved_position(plan):
            warn(
                f"_init_training_state returned {tuple(position)}, but training starts at "
                f"{self._saved_position(plan)} (epochs, batches), because the checkpoint determines the position. To "
                "start elsewhere, set ignore_data_skip=True or skip batches in get_train_dataloader"
            )
        trainer.model_wrapped, loader = trainer._prepare_for_training(plan.max_steps, loader, checkpoint)
        size = session.update_size(trainer.args)
        log_plan(
            plan,
            batch_size=size.batch_size,
            num_devices=trainer.accelerator.capabilities.num_devices,
            accumulation=size.accumulation_steps,
            num_parameters=trainer.get_num_trainable_parameters(),
        )
        return TrainingLoop(
            trainer, session, plan, loader, resume_point=self._start, trial=self._trial, ignore_keys=self._ignore_keys
        )

    def init_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, checkpoint: str | None
    ) -> tuple[int, int]:
        """Implement ``Trainer._init_training_state``."""
        trainer, session = self._trainer, self._session
        assert self._plan is not None
        plan = self._plan = replace(
            self._plan, max_steps=max_steps, steps_per_epoch=steps_per_epoch, num_epochs=num_epochs
        )
        if self._resumed is None:
            trainer.state = self._new_state(plan)
        else:
            trainer.state = self._resumed.restore_state(plan)
            if (
                checkpoint is not None
                and Path(checkpoint).resolve().parent == session.output_dir(trainer.args).resolve()
            ):
                session.saved_steps.add(trainer.state.global_step)
            trainer._load_callback_state()
        if (running := session.trial) is not None:
            trainer.state.is_hyper_param_search = True
            trainer.state.trial_name, trainer.state.trial_params = running.name, dict(running.values)
        return self._saved_position(plan)

    def _saved_position(self, plan: TrainingPlan) -> tuple[int, int]:
        """Convert the checkpoint's steps to the number of complete epochs and the number of batches in the next one."""
        epochs, steps = divmod(self._trainer.state.global_step, max(plan.steps_per_epoch, 1))
        steps = 0 if self._trainer.args.ignore_data_skip else steps
        return epochs, steps * self._session.update_size(self._trainer.args).accumulation_steps

    def prepare(self, max_steps: int, loader: Any) -> tuple[torch.nn.Module, Any]:
        """Implement ``Trainer._prepare_for_training``."""
        trainer, session = self._trainer, self._session
        assert self._plan is not None
        self._prepare_optimizer(max_steps)
        trainer.callback_handler.train_dataloader = loader
        session.cursor.load_state_dict(TrainCursor().state_dict())
        self._start = ResumePoint() if self._resumed is None else self._resumed.load(loader, self._plan)
        return trainer.model_wrapped, loader

    def _prepare_optimizer(self, max_steps: int) -> None:
        """Create the optimizer and the scheduler if they were not given, and prepare them with the model.

        Collective: call on every rank.
        """
        trainer, prepared = self._trainer, self._session.optimizer
        trainer.optimizer = unwrapped(trainer.optimizer)
        if prepared.created_scheduler:
            trainer.lr_scheduler = None  # for another number of steps, or finished in an earlier run
        is_given = trainer.lr_scheduler is not None
        trainer.create_optimizer_and_scheduler(max_steps)
        prepared.created_scheduler = not is_given
        accelerator, optimizer, scheduler = trainer.accelerator, trainer.optimizer, trainer.lr_scheduler
        held = {id(p) for group in parameters_by_group(optimizer) for p in group}
        prepared.has_other_gradients = any(p.requires_grad and id(p) not in held for p in trainer.model.parameters())
        if splits_layers(trainer):
            prepare_pipeline(trainer, prepared)
            trainer.optimizer, prepared.scheduler = accelerator.prepare(optimizer, scheduler)
        elif (wrapped := trainer._wrap_model(trainer.model_wrapped)) in (trainer.model_wrapped, trainer.model):
            trainer.model_wrapped, trainer.optimizer, prepared.scheduler = accelerator.prepare(
                trainer.model, optimizer, scheduler
            )
            trainer.model = accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
        else:  # the user's own wrapper
            trainer.model_wrapped = wrapped
            trainer.optimizer, prepared.scheduler = accelerator.prepare(optimizer, scheduler)
        # Schedulers count optimizer steps here, so the loop can step the unwrapped object.
        own = prepared.scheduler
        trainer.lr_scheduler = own.scheduler if isinstance(own, AcceleratedScheduler) else own
        prepared.is_foreign_scheduler = not isinstance(scheduler, (LRScheduler, DummyScheduler))
        if prepared.is_foreign_scheduler and getattr(scheduler, "optimizer", None) is optimizer:
            scheduler.optimizer = trainer.optimizer.optimizer  # as engines do for torch schedulers
        prepared.steps_per_update = not steps_with_metric(trainer.lr_scheduler)
        prepared.is_prepared = True
        if trainer.is_deepspeed_enabled:
            trainer.deepspeed = trainer.model_wrapped
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler

    def _new_state(self, plan: TrainingPlan) -> TrainerState:
        trainer, args = self._trainer, self._trainer.args
        state = TrainerState(
            max_steps=plan.max_steps,
            num_train_epochs=plan.num_epochs,
            train_batch_size=self._session.update_size(args).batch_size,
            is_local_process_zero=trainer.is_local_process_zero(),
            is_world_process_zero=trainer.is_world_process_zero(),
        )
        state.compute_steps(args, plan.max_steps)
        return state

    def _leave(self) -> None:
        self._trainer.is_in_train = False
        self._session.memory.cancel()
        self._trainer.accelerator.session.objects.forget_loader(self._trainer.callback_handler.train_dataloader)


def _checkpoint_argument(given: Any, options: Mapping[str, Any]) -> Any:
    """Return the checkpoint passed to ``train``, possibly under its old name ``model_path``."""
    unknown = [name for name in options if name != "model_path"]
    if unknown:
        raise UsageError(
            f"train() has no argument {', '.join(unknown)}", where="Trainer.train", do="see help(Trainer.train)"
        )
    if options.get("model_path") is None:
        return given
    warn("train(model_path=) was renamed to resume_from_checkpoint=")
    return options["model_path"] if given is None else given


# ---- exact modes -----------------------------------------------------------------------------------------------------


def _check_exact(trainer: TrainerMethods) -> None:
    """Check for settings that an exact mode does not support.

    Raises:
        ConfigError: ``auto_find_batch_size`` is set.
        UsageError: ``compute_loss`` divides by the whole update's item count, which is not known for a micro-batch.
    """
    parity = trainer.accelerator.parity
    if trainer.args.auto_find_batch_size:
        raise ConfigError(
            f"auto_find_batch_size does not work with parity={parity!r}",
            where="TrainingArguments.auto_find_batch_size",
            do="set max_micro_batch_size instead, which does not change the updates",
        )
    if trainer.loss_is_scaled_for_ga:
        raise UsageError(
            f"loss_is_scaled_for_ga=True does not work with parity={parity!r}, which weights the loss of each micro-batch by "
            "its labels",
            where=f"{type(trainer).__name__}.loss_is_scaled_for_ga",
            do="remove loss_is_scaled_for_ga and return the mean over the batch from compute_loss",
        )


def _exact_train_loader(trainer: TrainerMethods, batch_size: int) -> Any:
    """Return the loader from ``get_train_dataloader``; each of its batches is one update across all processes.

    An override reads ``batch_size`` from ``args.train_batch_size``. Warns if the loader's batch size differs.
    """
    with building_loader(trainer.args, batch_size):
        loader = trainer.get_train_dataloader()
    whole = getattr(loader, "original", loader)
    size = getattr(whole, "batch_size", None) or getattr(getattr(whole, "batch_sampler", None), "batch_size", None)
    if isinstance(size, int) and size != batch_size:
        parity = trainer.accelerator.parity
        warn(
            f"{type(trainer).__name__}.get_train_dataloader returned a loader with batches of {size} samples, but "
            f"global_batch_size is {batch_size}. With parity={parity!r}, each batch from the loader is one update "
            "across all processes, so "
            f"updates have {size} samples. Build the loader with args.train_batch_size, which is global_batch_size inside "
            f"get_train_dataloader, or set global_batch_size={size}"
        )
    return loader


# ---- errors ----------------------------------------------------------------------------------------------------------

_TIMEOUT = timedelta(seconds=10)  # for the other ranks to fail as well


def _save_after_error(error: BaseException, loop: TrainingLoop) -> None:
    """Save a checkpoint of the last completed step if possible; otherwise log the reason.

    If only some ranks fail, no checkpoint can be saved, because the other ranks are waiting in a collective.

    Collective: call on every rank that failed.
    """
    accelerator, step = loop.trainer.accelerator, loop.trainer.state.global_step
    why = None
    if loop.is_stepping:
        why = "the error occurred during the optimizer step"
    elif not step or loop.last_saved_step == step:
        return  # nothing to save, or already saved
    elif accelerator.num_processes > 1 and not same_on_all_ranks(
        f"step {step}: {type(error).__name__}", within=_TIMEOUT
    ):
        why = "the other ranks did not fail with the same error in this step"
    if why is not None:
        logger.error("%s: cannot save a checkpoint of step %d: %s", type(error).__name__, step, why)
        return
    try:
        loop.save_last_step()
    except Exception as problem:  # noqa: BLE001 - the caller raises the original error
        logger.error("saving a checkpoint of step %d failed: %s", step, problem)
    else:
        logger.error("%s: saved a checkpoint of step %d", type(error).__name__, step)
