"""Public names, which `__init__.py` imports on first use."""

# Submodules for `from echelon import ...`, which `from echelon import *` omits. `logging` would replace the standard module.
from echelon import (
    accelerator as accelerator,
    big_modeling as big_modeling,
    checkpointing as checkpointing,
    commands as commands,
    data_loader as data_loader,
    distributed as distributed,
    hooks as hooks,
    inference as inference,
    launchers as launchers,
    local_sgd as local_sgd,
    logging as logging,
    optimizer as optimizer,
    parallelism_config as parallelism_config,
    ray as ray,
    scheduler as scheduler,
    state as state,
    tracking as tracking,
    utils as utils,
)
from echelon._version import __version__ as __version__
from echelon.accelerator import (
    Accelerator as Accelerator,
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    DistributedType as DistributedType,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    PartialState as PartialState,
)
from echelon.accelerator.memory import find_executable_batch_size as find_executable_batch_size
from echelon.accelerator.models.load_pretrained import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from echelon.accelerator.models.prepare_pippy import prepare_pippy as prepare_pippy
from echelon.accelerator.packed_dataset import (
    PackedDataset as PackedDataset,
    packed_attention_mask as packed_attention_mask,
)
from echelon.accelerator.plugins.deepspeed_plugin import DeepSpeedPlugin as DeepSpeedPlugin
from echelon.accelerator.plugins.fsdp_plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from echelon.accelerator.plugins.kwargs_handlers import ProfileKwargs as ProfileKwargs
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig as ParallelismConfig
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration as ProjectConfiguration
from echelon.accelerator.prepare.data_loaders import skip_first_batches as skip_first_batches
from echelon.accelerator.update.local_sgd import LocalSGD as LocalSGD
from echelon.accelerator.weight_average import EMA as EMA, SWA as SWA
from echelon.base.errors import EchelonError as EchelonError
from echelon.big_models.cpu_offload import cpu_offload_with_hook as cpu_offload_with_hook
from echelon.big_models.device_map import infer_auto_device_map as infer_auto_device_map
from echelon.big_models.dispatch import (
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
)
from echelon.big_models.empty_weights import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from echelon.compat.enums import DDPCommunicationHookType as DDPCommunicationHookType
from echelon.data.rng.host_rng import synchronize_rng_states as synchronize_rng_states
from echelon.data.shared_memory import share_dataset as share_dataset
from echelon.engines.expert_parallel.moe import MixtureOfExperts as MixtureOfExperts
from echelon.engines.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from echelon.launch.spawn import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
from echelon.trainer import (
    BestRun as BestRun,
    CallbackHandler as CallbackHandler,
    DefaultFlowCallback as DefaultFlowCallback,
    EarlyStoppingCallback as EarlyStoppingCallback,
    EvalLoopOutput as EvalLoopOutput,
    EvalPrediction as EvalPrediction,
    HubStrategy as HubStrategy,
    IntervalStrategy as IntervalStrategy,
    NonFiniteError as NonFiniteError,
    OptimizerNames as OptimizerNames,
    ParallelMode as ParallelMode,
    PredictionOutput as PredictionOutput,
    PrinterCallback as PrinterCallback,
    ProgressCallback as ProgressCallback,
    SaveStrategy as SaveStrategy,
    SchedulerType as SchedulerType,
    Seq2SeqTrainer as Seq2SeqTrainer,
    Seq2SeqTrainingArguments as Seq2SeqTrainingArguments,
    Trainer as Trainer,
    TrainerCallback as TrainerCallback,
    TrainerControl as TrainerControl,
    TrainerState as TrainerState,
    TrainingArguments as TrainingArguments,
    TrainOutput as TrainOutput,
    default_data_collator as default_data_collator,
    get_last_checkpoint as get_last_checkpoint,
    get_scheduler as get_scheduler,
)
from echelon.world.seed import set_seed as set_seed
from echelon.world.world import World as World
