"""Provides the names in ``accelerate.utils``, implemented by echelon."""

from typing import TYPE_CHECKING

from echelon.accelerator.plugins.parallelism_config import ParallelismConfig as ParallelismConfig
from echelon.compat import reexports as _reexports, unsupported as _unsupported
from echelon.config.write import write_basic_config as write_basic_config
from echelon.engines.context_parallel.sequence_mask import shift_labels as shift_labels
from echelon.utils import rich as rich
from echelon.utils.ao import *
from echelon.utils.bnb import *
from echelon.utils.constants import *
from echelon.utils.dataclasses import *
from echelon.utils.deepspeed import *
from echelon.utils.environment import *
from echelon.utils.fsdp_utils import *
from echelon.utils.imports import *
from echelon.utils.memory import *
from echelon.utils.modeling import *
from echelon.utils.offload import *
from echelon.utils.operations import *
from echelon.utils.other import *
from echelon.utils.random import *
from echelon.utils.tqdm import *
from echelon.utils.versions import *

_unsupported.add_modules(globals(), "launch", "megatron_lm", "torch_xla", "transformer_engine")
if not TYPE_CHECKING:
    __all__ = list(_reexports.public_names(globals()))
