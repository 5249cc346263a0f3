"""Provides the names in ``accelerate.utils.constants``, implemented by echelon."""

from echelon.accelerator.profiling import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from echelon.base.versions import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from echelon.big_models.layerwise_casting import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
from echelon.compat.constants import *
