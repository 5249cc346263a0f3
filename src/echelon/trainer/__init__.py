"""LEVEL 3: the Trainer."""

from echelon.accelerator.preemption import Preempted
from echelon.trainer.arguments.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.callbacks.callback_handler import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
)
from echelon.trainer.callbacks.notebook_progress import NotebookProgressCallback
from echelon.trainer.callbacks.progress_bars import PrinterCallback, ProgressCallback
from echelon.trainer.checkpoint.checkpoint_folders import get_last_checkpoint
from echelon.trainer.data.collators import default_data_collator
from echelon.trainer.evaluation.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from echelon.trainer.features.hyperparameter_search import BestRun
from echelon.trainer.features.nonfinite import NonFiniteError
from echelon.trainer.optim.lr_schedules import get_scheduler
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
from echelon.trainer.state import TrainerControl, TrainerState
from echelon.trainer.trainer import Trainer

__all__ = [
    "BestRun",
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "HubStrategy",
    "IntervalStrategy",
    "NonFiniteError",
    "NotebookProgressCallback",
    "OptimizerNames",
    "ParallelMode",
    "Preempted",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "default_data_collator",
    "get_last_checkpoint",
    "get_scheduler",
]
