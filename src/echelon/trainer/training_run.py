"""One ``Trainer.train`` call: its set-up, and the loop of epochs, updates, logs, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.accelerator.checkpoint.folders import same_on_all_ranks
from echelon.accelerator.memory import clear_device_cache
from echelon.accelerator.out_of_memory import log_out_of_memory
from echelon.accelerator.packed_dataset import PackedDataset
from echelon.accelerator.preemption import Preempted
from echelon.accelerator.rng_states import current_random_states, restore_random_states
from echelon.accelerator.sequences import ChunkedLoss
from echelon.accelerator.tracking import record_hyperparameters
from echelon.accelerator.update.spike_guard import UpdatePosition
from echelon.accelerator.update.step_timing import record_planned_steps
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.protocols import SupportsSetEpoch
from echelon.base.warnings import warn
from echelon.checkpoint import storage
from echelon.trainer.arguments.enums import SaveStrategy
from echelon.trainer.arguments.training_arguments import checkpoint_place, recorded_arguments
from echelon.trainer.build_accelerator import accumulation_options, activation_mode, data_seed, set_seeds
from echelon.trainer.checkpoint.checkpoint_folders import (
    PREFIX,
    metric_for_best,
    point_to_best,
    remove_last_checkpoint,
    warn_of_unsaved_best,
)
from echelon.trainer.checkpoint.resume_point import (
    ResumedTraining,
    ResumePoint,
    find_checkpoint,
    saved_arguments,
    saved_batch_size,
)
from echelon.trainer.checkpoint.save import settle_save
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.data.epoch_batches import EpochBatches, warn_of_wrong_length
from echelon.trainer.data.packing import require_separate_examples
from echelon.trainer.features.auto_find_batch_size import evaluation_memory_error, find_batch_size_and_train
from echelon.trainer.features.chunked_loss import chunked_loss, require_same_loss
from echelon.trainer.features.memory_snapshot import memory_snapshot
from echelon.trainer.features.model_changes import (
    enable_activation_checkpointing,
    inspect_model,
    noisy_embeddings,
    set_up_model,
)
from echelon.trainer.features.nonfinite import NonFiniteError, checked_forward, first_bad
from echelon.trainer.features.spike_guard import SpikeResponse
from echelon.trainer.features.throughput import Throughput
from echelon.trainer.loss_window import MeanLoss
from echelon.trainer.optim.optimizers import set_optimizer_mode
from echelon.trainer.results import TrainOutput, speed_metrics
from echelon.trainer.session import TrainerSession, UpdateSize, global_batch_size
from echelon.trainer.signatures import takes
from echelon.trainer.state import TrainerState
from echelon.trainer.trainer_methods import TrainerMethods, count_tokens, is_overridden, log, notify
from echelon.trainer.training_plan import TrainingPlan, log_plan
from echelon.trainer.training_setup import (
    check_exact,
    check_quantized,
    checkpoint_argument,
    exact_train_loader,
    new_average,
    prepare_optimizer,
)

logger = get_logger(__name__)

_TIMEOUT = timedelta(seconds=10)  # for the other ranks to fail as well


class TrainingRun:
    """One ``Trainer.train`` call: sets up the data, model, optimizer and checkpoint, and runs the loop.

    ``start`` calls ``Trainer._inner_training_loop``, which comes back to ``train``: it prepares the run, and each epoch
    comes back to ``run_epoch``, which makes the updates. Owns the state of the call, such as the losses to log.

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
        self._resumed: ResumedTraining | None = None
        self._start = ResumePoint()
        self._plan: TrainingPlan
        self._chunked_loss: ChunkedLoss | None = None
        self._total = 0  # samples of one update of this process
        self._allows_changed_data = False
        # ``_prepare`` and ``_begin_loop`` set the rest, for each attempt of ``auto_find_batch_size``.

    # ---- the call ----------------------------------------------------------------------------------------------------

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
        wanted = checkpoint_argument(resume_from_checkpoint, options)
        trainer._hp_search_setup(self._trial)
        wanted = args.resume_from_checkpoint if wanted is None else wanted
        check_quantized(trainer.model)
        output_dir = self._session.checkpoint_dir(args)
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
                check_exact(trainer)
                if args.global_batch_size is None and self._folder is not None:
                    args.global_batch_size = saved_arguments(self._folder).get("global_batch_size")
                args.global_batch_size = global_batch_size(args, accelerator.session.num_readers)
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
            if args.activation_checkpointing and activation_mode(args) is None:
                enable_activation_checkpointing(trainer.model, args.activation_checkpointing_kwargs)
            if args.memory_snapshot is not None:
                stack.enter_context(memory_snapshot(args.memory_snapshot, trainer.accelerator))
            stack.enter_context(noisy_embeddings(trainer.model, trainer.neftune_noise_alpha))
            self._chunked_loss = None
            if args.loss_chunk is not None:
                self._chunked_loss = stack.enter_context(chunked_loss(trainer, session.interface, args.loss_chunk))
            if "underflow_overflow" in args.debug:
                stack.enter_context(checked_forward(trainer.model))
            self._prepare()
            preemption, is_wanted = trainer.accelerator.preemption, args.save_on_signal or args.enable_jit_checkpoint
            if is_wanted and not stack.enter_context(preemption.during(trainer.accelerator.session.watcher)):
                warn(
                    _(
                        "save_on_signal has no effect, because the program handles the signals itself or train() does "
                        "not run in the main thread"
                    )
                )
            elif args.save_strategy != "no":
                preemption.join()
            try:
                return self._run()
            except (Exception, KeyboardInterrupt) as error:
                log_out_of_memory(error)
                if args.save_on_exception:
                    self._save_after_error(error)
                raise

    def _leave(self) -> None:
        self._trainer.is_in_train = False
        self._session.memory.cancel()
        self._forget_average()
        self._trainer.accelerator.session.objects.forget_loader(self._trainer.callback_handler.train_dataloader)

    def _forget_average(self) -> None:
        if self._session.average is not None:
            self._trainer.accelerator.session.objects.forget_average(self._session.average)
            self._session.average = None

    # ---- its set-up --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepare the data, state, model, optimizer and loop, and load the checkpoint.

        Collective: call on every rank.
        """
        trainer, session = self._trainer, self._session
        arguments, defaults = recorded_arguments(trainer.args)
        record_hyperparameters("arguments", arguments, defaults=defaults)
        if trainer.accelerator.parity == "off":
            loader = trainer.get_train_dataloader()
        else:
            loader = exact_train_loader(
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
        session.started_save, session.model_files_hold_weights = None, False
        if self._folder is not None:
            session.resumed = self._resumed = ResumedTraining(
                trainer, session, self._folder, allows_changed_data=self._allows_changed_data
            )
            plan = self._resumed.extend_plan(plan)
        self._plan = plan
        checkpoint = None if self._folder is None else str(self._folder)
        position = trainer._init_training_state(
            plan.max_steps, plan.steps_per_epoch, plan.num_epochs, checkpoint, self._trial
        )
        if tuple(position) != self._saved_position(plan):
            warn(
                _(
                    "_init_training_state returned {position}, but training starts at {saved} (epochs, batches), "
                    "because the checkpoint determines the position. To start elsewhere, set ignore_data_skip=True or "
                    "skip batches in get_train_dataloader",
                    position=tuple(position),
                    saved=self._saved_position(plan),
                )
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
        totals = {"max_steps": plan.max_steps, "total_train_batch_size": plan.total_train_batch_size}
        record_hyperparameters("training", totals)
        self._begin_loop(loader)

    def init_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, checkpoint: str | None
    ) -> tuple[int, int]:
        """Implement ``Trainer._init_training_state``."""
        trainer, session = self._trainer, self._session
        plan = replace(self._plan, max_steps=max_steps, steps_per_epoch=steps_per_epoch, num_epochs=num_epochs)
        if self._resumed is None:
            trainer.state = TrainerState(
                max_steps=plan.max_steps,
                num_train_epochs=plan.num_epochs,
                train_batch_size=session.update_size(trainer.args).batch_size,
                is_local_process_zero=trainer.is_local_process_zero(),
                is_world_process_zero=trainer.is_world_process_zero(),
            )
            trainer.state.compute_steps(trainer.args, plan.max_steps)
        else:
            trainer.state = self._resumed.restore_state(plan)
            store, run_dir = trainer.accelerator.checkpoints.store, session.checkpoint_dir(trainer.args)
            if checkpoint is not None and (
                storage.real_path(store.origin(Path(checkpoint))).parent == storage.real_path(run_dir)
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
        prepare_optimizer(trainer, session, loader, max_steps)
        session.average = new_average(trainer.args)
        if session.average is not None:
            trainer.accelerator.prepare(trainer.optimizer, session.average)
        if self._chunked_loss is not None:
            require_same_loss(self._chunked_loss, trainer.model_wrapped, trainer.accelerator.device)
        if isinstance(rows := getattr(loader, "dataset", None), PackedDataset):
            num_rows = min(2, session.update_size(trainer.args).batch_size)
            require_separate_examples(
                trainer.model_wrapped, trainer.model, rows, num_rows=num_rows, device=trainer.accelerator.device
            )
        trainer.callback_handler.train_dataloader = loader
        session.cursor.load_state_dict(TrainCursor().state_dict())
        self._start = ResumePoint() if self._resumed is None else self._resumed.load(loader, self._plan)
        return trainer.model_wrapped, loader

    def _begin_loop(self, loader: Any) -> None:
        """Set the loop's state to that before the first update, or to that in the checkpoint."""
        trainer, session, accelerator = self._trainer, self._session, self._trainer.accelerator
        args = trainer.args
        self._loader = loader
        self._accumulation_steps = session.update_size(args).accumulation_steps
        self._syncs_each_batch = bool(accumulation_options(args).get("sync_each_batch"))
        self._cursor = cursor = session.cursor
        self._is_exact = accelerator.parity != "off"
        self._is_update_abandoned = False  # whether a callback ended the last update before its last batch
        self._is_stepping = False  # whether an optimizer step (including its bookkeeping) is in progress
        self._batches = EpochBatches(())  # of the current epoch
        self._is_length_warned = False
        self._last_saved_step: int | None = None
        self._is_ending = False  # saved after a signal; training ends
        self._boundary: dict[str, Any] | None = None  # state after the last complete step, to save after an error
        self._losses = session.losses = MeanLoss(accelerator, filtered=args.logging_nan_inf_filter)
        self._num_items: Any = None  # divisor of the losses of the update
        self._grad_norm: torch.Tensor | None = None
        self._learning_rate = 0.0
        self._step_takes_items = takes(trainer.training_step, "num_items_in_batch")
        self._counts_tokens = args.include_num_input_tokens_seen != "no"
        self._prepares_update = self._counts_tokens or args.torch_empty_cache_steps is not None
        self._first_step = session.initial_step = trainer.state.global_step
        session.initial_num_tokens = trainer.state.num_input_tokens_seen
        self._losses.last_logged_step = trainer.state.global_step
        if trainer.state.global_step and cursor.window:
            self._losses.restore(cursor.window["sums"], cursor.window["num_steps"])
            self._losses.last_logged_step, self._learning_rate = cursor.last_logged_step, cursor.learning_rate
            self._grad_norm = None if cursor.grad_norm is None else torch.tensor(cursor.grad_norm, dtype=torch.float64)
        cursor.batch_size, cursor.world_size = self._plan.batch_size, accelerator.session.num_readers
        cursor.parity, cursor.canonical_shards = accelerator.parity, accelerator.config.value.canonical_shards
        cursor.is_within_update = False
        self._throughput = Throughput(trainer, session)
        guard = accelerator.session.update.spikes
        self._spikes = (
            None if guard is None else SpikeResponse(trainer, guard, losses=self._losses, cursor=self._cursor)
        )
        self._saves_again = False  # whether the step that is taken again was saved
        session.loop = self

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> TrainOutput:
        """Train and return the results. Collective: call on every rank."""
        trainer, args, plan, start = self._trainer, self._trainer.args, self._plan, self._start
        self._start_time = time.time()
        self._throughput.start()
        if trainer.state.epoch is None:
            trainer.state.epoch = 0.0
        record_planned_steps(plan.max_steps)
        notify(trainer, "on_train_begin")
        if args.eval_on_start:
            trainer._evaluate(self._trial, self._ignore_keys, skip_scheduler=True)
        elif self._cursor.is_within_evaluation:
            start = self._start = self._repeat_evaluation(start)
        is_done = self._is_ending or (self._has_all_steps and not start.num_batches)
        # max_steps may need more epochs than planned if an epoch has fewer batches than its length.
        num_epochs = sys.maxsize if args.max_steps > 0 else plan.num_epochs
        for epoch in () if is_done else range(start.epoch, num_epochs):
            notify(trainer, "on_epoch_begin")
            trainer._run_epoch(
                model=trainer.model_wrapped,
                epoch=epoch,
                train_dataloader=self._loader,
                steps_in_epoch=plan.batches_per_epoch,
                num_update_steps_per_epoch=plan.steps_per_epoch,
                trial=self._trial,
                ignore_keys_for_eval=self._ignore_keys,
                start_time=self._start_time,
                resume_from_checkpoint=start.checkpoint,
                epochs_trained=start.epoch,
                steps_trained_in_current_epoch=start.num_batches,
            )
            if trainer.control.should_training_stop or self._has_all_steps:
                break
        return trainer._finalize_training(self._trial, plan.num_train_samples, self._start_time)

    def run_epoch(self, epoch: int, loader: Any) -> None:
        """Implement ``Trainer._run_epoch``."""
        trainer, plan, cursor = self._trainer, self._plan, self._cursor
        is_first = epoch == self._start.epoch
        start = self._start if is_first else ResumePoint(epoch=epoch)
        self._train_mode()  # a pass that begins in eval mode counts as an evaluation
        if isinstance(loader, SupportsSetEpoch):
            loader.set_epoch(epoch)
        if start.num_to_skip:
            loader = trainer.accelerator.skip_first_batches(loader, start.num_to_skip)
        cursor.is_read &= start.num_batches > 0  # as saved
        cursor.epoch, cursor.num_batches, cursor.is_over = epoch, start.num_batches, False
        if start.checkpoint is not None and not start.restores_rng_after_reading:
            trainer._load_rng_state(start.checkpoint)
        after_reading = start.checkpoint if start.restores_rng_after_reading else None
        self._record_boundary()
        num_planned = sys.maxsize if self._is_exact else plan.batches_per_epoch - cursor.num_batches
        batches = self._batches = EpochBatches(loader, trainer.accelerator, num_planned=num_planned)
        num_made = 0
        try:
            while not self._has_all_steps and not cursor.is_read and self._has_more():
                made = (
                    self._exact_update(batches, after_reading)
                    if self._is_exact
                    else self._update(batches, after_reading)
                )
                if not made:
                    cursor.is_read = True
                    break
                num_made += 1
                after_reading = None
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    break
            if not num_made and start.random_states is not None:
                restore_random_states(start.random_states)  # reading an empty rest may have drawn random numbers
            has_more = not (cursor.is_read or trainer.control.should_epoch_stop)
            if has_more and (plan.is_sized or not self._has_all_steps):
                has_more = self._has_more()
            if not has_more:
                batches.close()
            if not cursor.num_batches and not self._is_update_abandoned:
                logger.warning(
                    N_("the training data yielded no batch in epoch %d, so training stops at step %d of %d"),
                    epoch + 1,
                    trainer.state.global_step,
                    plan.max_steps,
                )
                trainer.control.should_training_stop = True
            elif not start.num_batches:
                self._warn_of_wrong_length(has_more=has_more)
            notify(trainer, "on_epoch_end")
            # A resumed run trains on the remaining batches.
            cursor.is_over, cursor.is_within_update = not has_more, has_more and self._is_update_abandoned
            self._end_step()
            self._stop_if_preempted(is_new_step=False)
        finally:
            batches.close()

    def finalize(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Implement ``Trainer._finalize_training``."""
        trainer, args = self._trainer, self._trainer.args
        self._losses.end()
        trainer.store_flos()
        num_steps = trainer.state.global_step - self._first_step
        mean = self._losses.total(num_steps=num_steps)
        part = num_steps / max(self._plan.max_steps, 1)  # below 1 if training stopped early or was resumed
        num_samples = int(num_train_samples * part)
        metrics = speed_metrics("train", start_time, num_samples=num_samples, num_steps=num_steps)
        metrics |= {"total_flos": trainer.state.total_flos, "train_loss": mean, **self._session.memory.end("train")}
        log(trainer, metrics)
        settle_save(trainer, self._session)
        run_dir = storage.location(trainer._get_output_dir(trial))
        # The best step may have been saved before it was evaluated.
        point_to_best(trainer.state, run_dir, saved=self._session.saved_steps)
        if args.load_best_model_at_end:
            warn_of_unsaved_best(args, trainer.state)
            if trainer.state.best_model_checkpoint is not None:
                self._forget_average()  # the files of the best checkpoint hold the averaged weights of its step
                trainer._load_best_model()
        if self._session.average is not None:
            self._session.average.copy_to_models()
            self._forget_average()
        remove_last_checkpoint(args, trainer.state, checkpoint_place(args, run_dir))
        notify(trainer, "on_train_end")
        trainer._finish_current_push()
        trainer.is_in_train = False
        return TrainOutput(trainer.state.global_step, mean, metrics)

    # ---- the end of an epoch -----------------------------------------------------------------------------------------

    @property
    def _has_all_steps(self) -> bool:
        """Whether all steps are done: ``max_steps`` of them, or those of a partial last epoch."""
        return not self._plan.ends_with_data and self._trainer.state.global_step >= self._num_steps

    @property
    def _num_steps(self) -> int:
        """Number of steps after which the run ends, unless its last epoch's data ends it."""
        num_beyond = 0 if self._trainer.args.max_steps > 0 else self._cursor.num_steps_beyond
        return self._plan.max_steps + num_beyond

    def _has_more(self, num_batches: int | None = None) -> bool:
        """Return whether the epoch has more than ``num_batches`` batches (default: the number already trained on).

        The data determines this, not the plan, unless the user has set a limit or the data seems infinite.

        Collective: call on every rank if ``EpochBatches.has_more`` is collective.
        """
        plan, cursor = self._plan, self._cursor
        num_batches = cursor.num_batches if num_batches is None else num_batches
        if num_batches < plan.batches_per_epoch:
            return True  # if the plan is wrong, reading detects it
        if plan.is_limited or cursor.has_no_end:
            return False
        if num_batches == cursor.num_batches and cursor.is_read:
            return False
        if not self._batches.has_more():
            return False
        num_workers = getattr(self._loader, "num_workers", 0)
        cursor.has_no_end = plan.is_sized and num_batches >= 2 * plan.batches_per_epoch + num_workers
        return not cursor.has_no_end

    def _is_last_step(self, num_batches: int) -> bool:
        """Return whether the current step, which ends after ``num_batches`` batches of the epoch, is the last one."""
        plan, cursor = self._plan, self._cursor
        if not plan.ends_with_data:
            return self._trainer.state.global_step + 1 >= self._num_steps
        return cursor.epoch + 1 >= plan.num_epochs and (
            self._batches.is_known_to_be_over or not self._has_more(num_batches)
        )

    def _warn_of_wrong_length(self, *, has_more: bool) -> None:
        """Warn once if an epoch has more or fewer batches than planned."""
        trainer, plan, cursor = self._trainer, self._plan, self._cursor
        if self._is_length_warned or not plan.is_sized or cursor.num_batches == plan.batches_per_epoch:
            return
        is_short = cursor.num_batches < plan.batches_per_epoch
        if is_short and (not cursor.is_read or plan.is_limited or trainer.control.should_epoch_stop):
            return  # the epoch was ended early
        self._is_length_warned = True
        warn_of_wrong_length(
            plan,
            self._loader,
            epoch=cursor.epoch,
            num_batches=cursor.num_batches,
            has_more=has_more or cursor.has_no_end,
            ends=cursor.has_no_end,
            max_steps=trainer.args.max_steps,
        )

    # ---- an update ---------------------------------------------------------------------------------------------------

    def _update(self, batches: EpochBatches, checkpoint: str | None) -> bool:
        """Take one optimizer step with the next batches; return False if there are none.

        Args:
            batches: the epoch's batches.
            checkpoint: restore this checkpoint's RNG states after the batches are read.
        """
        trainer, losses = self._trainer, self._losses
        get, device = trainer.get_batch_samples, trainer.accelerator.device
        wanted, num_left = self._accumulation_steps, self._plan.batches_per_epoch - self._cursor.num_batches
        planned = min(wanted, num_left) if num_left > 0 else wanted
        group, num_items = get(batches, planned, device)
        # Batches beyond the planned ones belong to the update, too.
        if planned < wanted and len(group) == planned and not self._plan.is_limited and batches.has_more():
            more, num_more = get(batches, wanted - planned, device)
            group = [*group, *more]
            num_items = None if num_items is None or num_more is None else num_items + num_more
        self._num_items = num_items
        if not group:
            return False
        if checkpoint is not None:
            trainer._load_rng_state(checkpoint)
        notify(trainer, "on_step_begin")
        trainer.current_gradient_accumulation_steps = len(group)
        last = len(group) - 1
        if self._prepares_update:
            self._prepare_update(group)
        if self._spikes is not None:
            self._spikes.begin_update()
        # The training step may change a batch.
        held = [copy.copy(inputs) for inputs in group] if self._spikes is not None and self._spikes.can_undo else []
        counts_flops = self._session.interface.counts_flops
        for i, inputs in enumerate(group):
            if counts_flops:
                self._throughput.add(inputs)
            self._train_one(inputs, num_items, is_last=i == last)
            if i < last:
                control = notify(trainer, "on_substep_end")
                if control.should_epoch_stop or control.should_training_stop:
                    # The losses and the gradients of an update that a callback ended early do not count.
                    losses.drop_open_step()
                    self._zero_grad()
                    self._is_update_abandoned = True
                    return True

        def repeat() -> None:
            for i, inputs in enumerate(held):
                self._train_one(inputs, num_items, is_last=i == last)

        if self._spikes is None:
            self._clip()
            self._step(group, num_batches=len(group))
        else:
            self._step_unless_spike(self._spikes, group, num_batches=len(group), repeat=repeat)
        return True

    def _train_one(self, inputs: Any, num_items: Any, *, is_last: bool) -> None:
        """Run the passes of one batch of an update; gradients are synchronized in the last one only."""
        trainer = self._trainer
        if is_last or self._syncs_each_batch:
            self._losses.add(self._train_on(inputs, num_items))
            return
        with trainer.accelerator.no_sync(trainer.model_wrapped):
            self._losses.add(self._train_on(inputs, num_items))

    def _exact_update(self, batches: Any, checkpoint: str | None) -> bool:
        """Take one optimizer step with the loader's micro-batches; return False if there are none.

        The arguments are the same as for ``_update``.
        """
        trainer, model, accelerator = self._trainer, self._trainer.model_wrapped, self._trainer.accelerator
        trainer.current_gradient_accumulation_steps = 1  # losses are weighted by samples or labels instead
        group: list[Any] = []
        driver, spikes = accelerator.session.update.driver, self._spikes
        counts_flops = self._session.interface.counts_flops
        assert driver is not None
        held: list[tuple[Any, Any, Any]] = []  # batches, their numbers of items and their shares, to compute again
        while not group or not accelerator.sync_gradients:
            if group:
                notify(trainer, "on_substep_end")
            group, num_items = trainer.get_batch_samples(batches, 1, accelerator.device)
            if not group:
                return False
            if checkpoint is not None:
                trainer._load_rng_state(checkpoint)
                checkpoint = None
            if accelerator.progress.micro_step <= 1:
                notify(trainer, "on_step_begin")
            if self._prepares_update:
                self._prepare_update([accelerator.trim_for_metrics(inputs) for inputs in group])
            if spikes is not None and accelerator.progress.micro_step <= 1:
                spikes.begin_update()
            if spikes is not None and spikes.can_undo:
                held.append((copy.copy(group[0]), num_items, driver.contribution()))
            if counts_flops:
                self._throughput.add(accelerator.trim_for_metrics(group[0]))
            with accelerator.accumulate(model):
                self._train_on(group[0], num_items)
        self._add_exact_loss()

        def repeat() -> None:
            for inputs, num_items, contribution in held:
                driver.repeat_micro_step(contribution)
                with accelerator.accumulate(model):
                    self._train_on(inputs, num_items)
            self._add_exact_loss()

        if spikes is None:
            self._clip()
            self._step(group, num_batches=1)
        else:
            self._step_unless_spike(spikes, group, num_batches=1, repeat=repeat)
        return True

    def _add_exact_loss(self) -> None:
        """Add the loss of the update, the same on all ranks. Collective."""
        accelerator = self._trainer.accelerator
        loss = accelerator.update_loss()
        self._losses.add(torch.tensor(loss, dtype=torch.float64))
        if self._spikes is not None:
            self._spikes.guard.set_loss(loss)

    def _prepare_update(self, group: list[Any]) -> None:
        """Count an update's tokens and empty the memory cache if the arguments request it.

        Collective: call on every rank if tokens are counted.
        """
        every = self._trainer.args.torch_empty_cache_steps
        if every is not None and self._trainer.state.global_step % every == 0:
            clear_device_cache()
        if self._counts_tokens and not is_overridden(self._trainer, "_track_num_input_tokens"):
            count_tokens(self._trainer, group)

    def _train_on(self, inputs: Any, num_items: Any) -> torch.Tensor:
        """Run one batch's forward and backward pass, and return its loss."""
        trainer, model = self._trainer, self._trainer.model_wrapped
        if not (model.training and trainer.model.training):  # for example after an evaluation
            self._train_mode()
        if self._step_takes_items:
            loss = trainer.training_step(model, inputs, num_items)
        else:
            loss = trainer.training_step(model, inputs)
        # An override gets every batch; otherwise ``_prepare_update`` has counted those of the update with one reduction.
        if is_overridden(trainer, "_track_num_input_tokens"):
            trainer._track_num_input_tokens(inputs)
        return loss

    def _train_mode(self) -> None:
        self._trainer.model_wrapped.train()
        self._trainer.model.train()
        set_optimizer_mode(self._trainer.optimizer, "train")

    def _step_unless_spike(
        self, spikes: SpikeResponse, group: list[Any], *, num_batches: int, repeat: Callable[[], None]
    ) -> None:
        """Clip the gradients of an update and step, unless ``spike_guard`` drops it.

        Args:
            group: its batches; in the exact modes, the last one.
            num_batches: number of batches that it adds to the position.
            repeat: computes its gradients again.
        """
        trainer = self._trainer
        norm, step = self._grad_norm, trainer.state.global_step
        self._clip()
        position = None
        if not self._is_exact:
            first = self._cursor.num_batches
            position = UpdatePosition(epoch=self._cursor.epoch, numbers=range(first, first + num_batches))

        def repeat_and_clip() -> None:
            repeat()
            self._clip()

        is_kept = spikes.settle(position, repeat=repeat_and_clip)
        is_undone = trainer.state.global_step < step
        if self._plan.ends_with_data and (is_undone or not is_kept):
            trainer.state.max_steps -= 1
        if is_kept:
            # The checkpoint of a step that was undone contains it.
            self._saves_again = is_undone and self._last_saved_step == step
            self._step(group, num_batches=num_batches)
            return
        self._grad_norm = norm
        self._advance(num_batches)

    def _clip(self) -> None:
        trainer = self._trainer
        if trainer.args.max_grad_norm:
            self._grad_norm = trainer._clip_grad_norm(trainer.model_wrapped)

    def _advance(self, num_batches: int) -> None:
        """Move the position behind the batches of an update that is complete or was dropped."""
        state, cursor = self._trainer.state, self._cursor
        cursor.num_batches += num_batches
        cursor.is_read = self._batches.is_known_to_be_over
        state.epoch = cursor.epoch + min(cursor.num_batches / self._plan.batches_per_epoch, 1.0)
        if self._trainer.args.save_on_exception:
            self._record_boundary()

    def _step(self, group: list[Any], *, num_batches: int) -> None:
        """Step the optimizer and the scheduler, then log, evaluate, save and stop as requested."""
        trainer, cursor = self._trainer, self._cursor
        args, state, model, losses = trainer.args, trainer.state, trainer.model_wrapped, self._losses
        optimizer = trainer.optimizer
        # Without clipping, the default would compute a norm, which is logged only if an override asks for it.
        if is_overridden(trainer, "_get_grad_norm"):
            self._grad_norm = trainer._get_grad_norm(model, grad_norm=self._grad_norm if args.max_grad_norm else None)
        if args.stop_on_nan:
            self._stop_on_nan(group)
        losses.end_step()
        notify(trainer, "on_pre_optimizer_step")
        self._is_stepping = True
        optimizer.step()
        notify(trainer, "on_optimizer_step")
        self._learning_rate = trainer._get_learning_rate()
        if cursor.num_batches >= self._plan.batches_per_epoch:
            cursor.num_steps_beyond += 1
        # Beyond its planned steps the scheduler keeps its last rate: a cosine would rise again.
        is_beyond = state.global_step + 1 >= self._plan.max_steps and not self._is_last_step(
            cursor.num_batches + num_batches
        )
        if (
            self._session.optimizer.steps_per_update
            and not is_beyond
            and not (args.fp16 and trainer.accelerator.optimizer_step_was_skipped)
        ):
            trainer.lr_scheduler.step()
        self._zero_grad()
        state.global_step += 1
        if is_beyond and state.global_step >= state.max_steps:
            state.max_steps = state.global_step + 1  # so that callbacks do not stop training yet
        self._advance(num_batches)
        self._is_stepping = False
        notify(trainer, "on_step_end")
        if self._saves_again:
            trainer.control.should_save, self._saves_again = True, False
        self._end_step()
        self._stop_if_preempted(is_new_step=True)

    def _zero_grad(self) -> None:
        """Zero the model's gradients, including those of weights that the optimizer does not contain."""
        has_others = self._session.optimizer.has_other_gradients
        (self._trainer.model_wrapped if has_others else self._trainer.optimizer).zero_grad()

    def _stop_on_nan(self, group: list[Any]) -> None:
        """Raise before the optimizer changes the weights if a loss or gradient is nonfinite.

        Collective: call on every rank.
        """
        trainer = self._trainer
        is_bad = not all(bool(loss.isfinite().all()) for loss in self._losses.last(len(group)))
        if self._grad_norm is not None and not trainer.args.fp16:  # loss scaling handles overflow
            is_bad |= not bool(torch.as_tensor(self._grad_norm).isfinite())
        session = trainer.accelerator.session
        # Ranks with the same samples have the same losses and norms; accelerator.reduce counts ranks that share samples once.
        if not (is_bad if session.num_readers == 1 else session.on_any_rank(is_bad)):
            return
        step = trainer.state.global_step + 1
        is_sharded = trainer.accelerator.capabilities.shards_parameters  # then a forward pass would be collective
        what = first_bad(trainer.model, group, compute_loss=None if is_sharded else self._compute_loss)
        raise NonFiniteError(
            f"a loss or gradient in step {step} is not finite: {what or 'see the error on another rank'}",
            where=f"step {step}, epoch {trainer.state.epoch:.3g}",
        )

    def _compute_loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        takes_items = self._session.interface.compute_loss_takes_items
        options: Any = {"num_items_in_batch": self._num_items} if takes_items else {}
        loss: Any = self._trainer.compute_loss(model, self._trainer._prepare_inputs(inputs), **options)
        assert isinstance(loss, torch.Tensor)
        return loss

    # ---- what follows an update --------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Log, evaluate and save as requested, through the override of ``_maybe_log_save_evaluate`` if there is one."""
        trainer, state = self._trainer, self._trainer.state
        if not is_overridden(trainer, "_maybe_log_save_evaluate"):
            self.log_evaluate_save()  # without the sum of the losses, which waits for the device
            return
        trainer._maybe_log_save_evaluate(
            torch.tensor(self._losses.window_sum(), device=trainer.accelerator.device),
            self._grad_norm,
            trainer.model_wrapped,
            self._trial,
            self._cursor.epoch,
            self._ignore_keys,
            self._start_time,
            learning_rate=self._learning_rate if state.global_step > self._first_step else None,
        )

    def log_evaluate_save(self, grad_norm: Any = None, learning_rate: float | None = None) -> None:
        """Implement ``Trainer._maybe_log_save_evaluate``.

        Args:
            grad_norm: the norm to log (default: that of the last step).
            learning_rate: the learning rate to log (default: that of the last step).
        """
        trainer, state = self._trainer, self._trainer.state
        losses = self._losses
        if trainer.control.should_log and state.global_step > losses.last_logged_step:
            logs: dict[str, Any] = {"loss": losses.take()}
            norm = self._grad_norm if grad_norm is None else grad_norm
            if norm is not None:
                logs["grad_norm"] = norm.item() if isinstance(norm, torch.Tensor) else norm
            logs["learning_rate"] = self._learning_rate if learning_rate is None else learning_rate
            if trainer.args.log_throughput:
                num_steps = state.global_step - losses.last_logged_step
                num_samples = num_steps * self._plan.total_train_batch_size
                logs |= self._throughput.rates(num_steps=num_steps, num_samples=num_samples)
            losses.last_logged_step = state.global_step
            trainer.store_flos()
            log(trainer, logs, self._start_time if self._counts_tokens else None)
        if trainer.control.should_evaluate:
            metrics = trainer._evaluate(self._trial, self._ignore_keys)
            if metrics is None:
                return
            is_best = trainer._determine_best_metric(metrics=metrics, trial=self._trial)
            if trainer.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            self._save()

    def evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float] | None:
        """Implement ``Trainer._evaluate``; return None if preemption interrupted it and a checkpoint was saved."""
        trainer, states = self._trainer, current_random_states()
        self._session.evaluation.is_repeatable = True
        try:
            metrics = trainer.evaluate(ignore_keys=ignore_keys_for_eval)
        except Preempted:
            restore_random_states(states)
            self._cursor.is_within_evaluation = True
            self._cursor.saves_after_evaluation = trainer.control.should_save
            self._save_and_end()
            return None
        except RuntimeError as error:
            size = trainer.args.per_device_eval_batch_size
            if trainer.args.auto_find_batch_size and (memory_error := evaluation_memory_error(error, batch_size=size)):
                raise memory_error from error
            raise
        finally:
            self._session.evaluation.is_repeatable = False
        trainer._report_to_hp_search(trial, trainer.state.global_step, metrics)
        if not skip_scheduler and not self._session.optimizer.steps_per_update:
            trainer.lr_scheduler.step(metric_for_best(trainer.args, metrics))
        return metrics

    def _repeat_evaluation(self, start: ResumePoint) -> ResumePoint:
        """Repeat the evaluation that preemption interrupted, and return the new resume point."""
        trainer, cursor = self._trainer, self._cursor
        if start.random_states is not None:
            restore_random_states(start.random_states)
        trainer.control.should_evaluate, trainer.control.should_save = True, cursor.saves_after_evaluation
        cursor.is_within_evaluation = False
        self._end_step()
        self._stop_if_preempted(is_new_step=False)
        return replace(start, random_states=current_random_states())

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save a checkpoint. Collective: call on every rank."""
        trainer, cursor = self._trainer, self._cursor
        cursor.window = self._losses.state()
        cursor.last_logged_step, cursor.learning_rate = self._losses.last_logged_step, self._learning_rate
        cursor.grad_norm = None if self._grad_norm is None else float(self._grad_norm)
        cursor.schedule = trainer.lr_scheduler.state_dict() if self._session.optimizer.is_foreign_scheduler else None
        trainer._save_checkpoint(trainer.model, self._trial)
        self._last_saved_step = trainer.state.global_step
        notify(trainer, "on_save")

    def _record_boundary(self) -> None:
        """Record the state that ``_save_last_step`` restores after an error in the next update."""
        if self._trainer.args.save_on_exception:
            self._boundary = {
                "random_states": current_random_states(),
                "progress": self._trainer.accelerator.progress.to_json(),
                "loader": self._loader.state_dict() if self._is_exact and hasattr(self._loader, "last_step") else None,
            }

    def _save_after_error(self, error: BaseException) -> None:
        """Save a checkpoint of the last completed step if possible; otherwise log the reason.

        If only some ranks fail, no checkpoint can be saved, because the other ranks are waiting in a collective.

        Collective: call on every rank that failed.
        """
        accelerator, step = self._trainer.accelerator, self._trainer.state.global_step
        why = None
        if self._is_stepping:
            why = _("the error occurred during the optimizer step")
        elif not step or self._last_saved_step == step:
            return  # nothing to save, or already saved
        elif accelerator.num_processes > 1 and not same_on_all_ranks(
            f"step {step}: {type(error).__name__}", within=_TIMEOUT
        ):
            why = _("the other ranks did not fail with the same error in this step")
        if why is not None:
            logger.error(N_("%s: cannot save a checkpoint of step %d: %s"), type(error).__name__, step, why)
            return
        try:
            self._save_last_step()
        except Exception as problem:  # noqa: BLE001 - the caller raises the original error
            logger.error(N_("saving a checkpoint of step %d failed: %s"), step, problem)
        else:
            if accelerator.checkpoints.store.is_saved:  # a failed save has been reported
                logger.error(N_("%s: saved a checkpoint of step %d"), type(error).__name__, step)

    def _save_last_step(self) -> None:
        """Save a checkpoint of the state after the last completed step. Collective: call on every rank."""
        trainer, boundary = self._trainer, self._boundary
        assert boundary is not None
        self._losses.drop_open_step()
        restore_random_states(boundary["random_states"])
        if boundary["loader"] is not None:
            self._loader.load_state_dict(boundary["loader"])
        trainer.accelerator.gradient_state.sync_gradients = True
        trainer.accelerator.progress.load_json(boundary["progress"])
        self._cursor.is_within_update = True
        self._save()
        settle_save(trainer, self._session)

    def _stop_if_preempted(self, *, is_new_step: bool) -> None:
        """If the ranks have agreed to stop here, save and end the process (or, with
        ``enable_jit_checkpoint``, only the run).

        Collective: call on every rank, once the ranks have agreed to stop.

        Raises:
            Preempted: the checkpoint has been saved, and the process must end.
        """
        preemption, step = self._trainer.accelerator.preemption, self._trainer.state.global_step
        if self._is_ending or not preemption.at_boundary(is_new_step=is_new_step, is_whole=True):
            return
        self._save_and_end(is_needed=self._last_saved_step != step or self._cursor.is_over)

    def _save_and_end(self, *, is_needed: bool = True) -> None:
        trainer, step = self._trainer, self._trainer.state.global_step
        if is_needed:
            self._save()
        settle_save(trainer, self._session)
        is_saved = trainer.accelerator.checkpoints.store.is_saved
        how = _("saved a checkpoint") if is_saved else _("could not save a checkpoint")
        logger.warning(N_("stopping after a signal: %s of step %d of %d"), how, step, self._plan.max_steps)
        if not trainer.args.enable_jit_checkpoint or trainer.args.save_on_signal:
            raise Preempted
        self._is_ending = trainer.control.should_training_stop = True

    def load_rng_state(self) -> None:
        """Implement ``Trainer._load_rng_state``."""
        if self._start.random_states is not None:
            restore_random_states(self._start.random_states)
        self._trainer.accelerator.session.engine.share_random_states()
