"""LEVEL 3: the Trainer. Floor 9."""

from echelon.accelerator.preemption import Preempted
from echelon.trainer.arguments import TrainingArguments
from echelon.trainer.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
)
from echelon.trainer.checkpoints import get_last_checkpoint
from echelon.trainer.collate import default_data_collator
from echelon.trainer.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)
from echelon.trainer.nonfinite import NonFiniteError
from echelon.trainer.notebook import NotebookProgressCallback
from echelon.trainer.progress_bars import PrinterCallback, ProgressCallback
from echelon.trainer.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
from echelon.trainer.schedules import get_scheduler
from echelon.trainer.search import BestRun
from echelon.trainer.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
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
