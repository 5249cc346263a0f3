"""One ``Trainer.train`` call: sets up the data, model, optimizer and checkpoint, and runs the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.trainer.build_accelerator import accumulation_options, data_seed, set_seeds
from echelon.trainer.checkpoint.checkpoint_folders import PREFIX
from echelon.trainer.checkpoint.resume_point import (
    ResumedTraining,
    ResumePoint,
    find_checkpoint,
    saved_arguments,
    saved_batch_size,
)
from echelon.trainer.checkpoint.save_on_error import save_checkpoint_after_error
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.features.auto_find_batch_size import find_batch_size_and_train
from echelon.trainer.features.model_changes import enable_activation_checkpointing
from echelon.trainer.features.neftune import noisy_embeddings
from echelon.trainer.features.nonfinite import checked_forward
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.loop import TrainingLoop
from echelon.trainer.model_interface import inspect_model, set_up_model
from echelon.trainer.parity import check_exact, exact_train_loader
from echelon.trainer.results import TrainOutput
from echelon.trainer.session import TrainerSession, UpdateSize, global_batch_size
from echelon.trainer.state import TrainerState
from echelon.trainer.training_plan import TrainingPlan, log_plan, make_plan, num_examples_of

__all__ = ["TrainingRun", "plan_training"]


class TrainingRun:
    """One ``Trainer.train`` call.

    Args:
        hooks: the Trainer's hooks.
        session: the Trainer's session.
        trial: a trial's settings as a dict, or an optuna trial.
        ignore_keys: model outputs that evaluations ignore.
    """

    def __init__(
        self, hooks: TrainerHooks, session: TrainerSession, *, trial: Any, ignore_keys: list[str] | None
    ) -> None:
        self._hooks = hooks
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
        hooks, args, accelerator = self._hooks, self._hooks.args, self._hooks.accelerator
        self._allows_changed_data = bool(
            options.pop("allow_changed_data", False)
            or args.allow_changed_data
            or accelerator.config.value.allow_changed_data
        )
        wanted = _checkpoint_argument(resume_from_checkpoint, options)
        hooks._hp_search_setup(self._trial)
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
                check_exact(hooks)
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
                return hooks._inner_training_loop(
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
                return find_batch_size_and_train(hooks, train, batch_size=batch_size, accumulation=accumulation)
            finally:
                self._session.run = self._session.resumed = self._session.loop = None

    def _set_global_batch_size(self) -> None:
        """Set ``global_batch_size``, if it is not given, from the checkpoint or from the batch size per process."""
        args = self._hooks.args
        if args.global_batch_size is None and self._folder is not None:
            args.global_batch_size = saved_arguments(self._folder).get("global_batch_size")
        args.global_batch_size = global_batch_size(args, self._hooks.accelerator.session.num_readers)

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
        hooks, session = self._hooks, self._session
        args = hooks.args
        if batch_size is not None and args.auto_find_batch_size:
            hooks._update_auto_batch_size(batch_size)
        elif batch_size is not None:
            self.set_batch_size(batch_size)
        if resume_from_checkpoint is None or self._folder is None or Path(resume_from_checkpoint) != self._folder:
            self._folder = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        self._ignore_keys = ignore_keys_for_eval
        hooks.accelerator.dataloader_config.data_seed = data_seed(args)  # a script may have changed args since
        if hooks.model_init is not None:
            set_seeds(args)
            hooks.accelerator.free_memory()
            hooks.model = hooks.model_wrapped = hooks.call_model_init(self._trial)
            hooks.optimizer = hooks.lr_scheduler = None
            set_up_model(hooks)
        session.interface = inspect_model(hooks, base=session.base, before=session.interface)
        hooks.is_in_train = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave)
            session.memory.begin("train")
            if args.activation_checkpointing:
                enable_activation_checkpointing(hooks.model, args.activation_checkpointing_kwargs)
            stack.enter_context(noisy_embeddings(hooks.model, hooks.neftune_noise_alpha))
            if "underflow_overflow" in args.debug:
                stack.enter_context(checked_forward(hooks.model))
            loop = session.loop = self._prepare_loop()
            preemption, is_wanted = hooks.accelerator.preemption, args.save_on_signal or args.enable_jit_checkpoint
            if is_wanted and not stack.enter_context(preemption.during(hooks.accelerator.session.watcher)):
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
                    save_checkpoint_after_error(error, loop)
                raise

    def _prepare_loop(self) -> TrainingLoop:
        """Prepare the data, state, model and optimizer, load the checkpoint, and return the loop.

        Collective: call on every rank.
        """
        hooks, session = self._hooks, self._session
        if hooks.accelerator.parity == "off":
            loader = hooks.get_train_dataloader()
        else:
            loader = exact_train_loader(hooks, global_batch_size(hooks.args, hooks.accelerator.session.num_readers))
        session.plan = None
        values = hooks.set_initial_training_values(hooks.args, loader)
        plan = session.plan or plan_training(hooks, session, loader)
        plan = plan.with_initial_values(values)
        session.resumed = self._resumed = None
        session.saved_steps.clear()
        if self._folder is not None:
            session.resumed = self._resumed = ResumedTraining(
                hooks, session, self._folder, allows_changed_data=self._allows_changed_data
            )
            plan = self._resumed.extend_plan(plan)
        self._plan = session.plan = plan
        checkpoint = None if self._folder is None else str(self._folder)
        position = hooks._init_training_state(
            plan.max_steps, plan.steps_per_epoch, plan.num_epochs, checkpoint, self._trial
        )
        if tuple(position) != self._saved_position(plan):
            warn(
                f"_init_training_state returned {tuple(position)}, but training starts at "
                f"{self._saved_position(plan)} (epochs, batches), because the checkpoint determines the position. To "
                "start elsewhere, set ignore_data_skip=True or skip batches in get_train_dataloader"
            )
        hooks.model_wrapped, loader = hooks._prepare_for_training(plan.max_steps, loader, checkpoint)
        size = session.update_size(hooks.args)
        log_plan(
            plan,
            batch_size=size.batch_size,
            num_devices=hooks.accelerator.capabilities.num_devices,
            accumulation=size.accumulation_steps,
            num_parameters=hooks.get_num_trainable_parameters(),
        )
        return TrainingLoop(
            hooks, session, plan, loader, resume_point=self._start, trial=self._trial, ignore_keys=self._ignore_keys
        )

    def init_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, checkpoint: str | None
    ) -> tuple[int, int]:
        """Implement ``Trainer._init_training_state``."""
        hooks, session = self._hooks, self._session
        assert self._plan is not None
        plan = self._plan = replace(
            self._plan, max_steps=max_steps, steps_per_epoch=steps_per_epoch, num_epochs=num_epochs
        )
        if self._resumed is None:
            hooks.state = self._new_state(plan)
        else:
            hooks.state = self._resumed.restore_state(plan)
            if checkpoint is not None and Path(checkpoint).resolve().parent == session.output_dir(hooks.args).resolve():
                session.saved_steps.add(hooks.state.global_step)
            hooks._load_callback_state()
        if (running := session.search.trial) is not None:
            hooks.state.is_hyper_param_search = True
            hooks.state.trial_name, hooks.state.trial_params = running.name, dict(running.values)
        return self._saved_position(plan)

    def _saved_position(self, plan: TrainingPlan) -> tuple[int, int]:
        """Convert the checkpoint's steps to the number of complete epochs and the number of batches in the next one."""
        epochs, steps = divmod(self._hooks.state.global_step, max(plan.steps_per_epoch, 1))
        steps = 0 if self._hooks.args.ignore_data_skip else steps
        return epochs, steps * self._session.update_size(self._hooks.args).accumulation_steps

    def prepare(self, max_steps: int, loader: Any) -> tuple[torch.nn.Module, Any]:
        """Implement ``Trainer._prepare_for_training``."""
        hooks, session = self._hooks, self._session
        assert self._plan is not None
        session.optimizer.prepare(hooks, max_steps)
        hooks.callback_handler.train_dataloader = loader
        session.cursor.load_state_dict(TrainCursor().state_dict())
        self._start = ResumePoint() if self._resumed is None else self._resumed.load(loader, self._plan)
        return hooks.model_wrapped, loader

    def _new_state(self, plan: TrainingPlan) -> TrainerState:
        hooks, args = self._hooks, self._hooks.args
        state = TrainerState(
            max_steps=plan.max_steps,
            num_train_epochs=plan.num_epochs,
            train_batch_size=self._session.update_size(args).batch_size,
            is_local_process_zero=hooks.is_local_process_zero(),
            is_world_process_zero=hooks.is_world_process_zero(),
        )
        state.compute_steps(args, plan.max_steps)
        return state

    def _leave(self) -> None:
        self._hooks.is_in_train = False
        self._session.memory.cancel()
        self._hooks.accelerator.session.objects.forget_loader(self._hooks.callback_handler.train_dataloader)


def plan_training(hooks: TrainerHooks, session: TrainerSession, loader: Any) -> TrainingPlan:
    """Return the plan for a run over ``loader``; in the exact modes, a batch holds all ranks' samples for one update.

    Collective: call on every rank if ``parity="off"``.
    """
    args, accelerator = hooks.args, hooks.accelerator
    world_size = accelerator.session.num_readers
    # The default returns an estimate where the length is unknown.
    count_examples = hooks.num_examples if session.is_overridden(hooks, "num_examples") else num_examples_of
    if accelerator.parity != "off":
        whole = getattr(loader, "original", loader)
        return make_plan(
            args,
            whole,
            num_examples=count_examples(whole),
            batch_size=getattr(whole, "batch_size", None) or global_batch_size(args, world_size),
            accumulation=1,
            world_size=1,
        )

    def gather_rows(row: list[int]) -> list[list[int]]:
        rows: list[list[int]] = accelerator.gather(torch.tensor([row], device=accelerator.device)).tolist()
        return rows

    size = session.update_size(args)
    batch_size = getattr(loader, "batch_size", None) or size.batch_size
    plan = make_plan(
        args,
        loader,
        num_examples=count_examples(loader),
        batch_size=batch_size // world_size if accelerator.split_batches else batch_size,
        accumulation=size.accumulation_steps,
        world_size=world_size,
        gather_rows=gather_rows if world_size > 1 else None,
    )
    if session.is_overridden(hooks, "get_total_train_batch_size"):  # the default does not look at the loader
        plan = replace(plan, total_train_batch_size=hooks.get_total_train_batch_size(args))
    return plan


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
