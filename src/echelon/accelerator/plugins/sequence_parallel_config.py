"""Settings of context parallelism (``cp_handler``) and sequence parallelism (``sp_handler``), under Accelerate's names."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.keywords import suggest_keywords

__all__ = ["DeepSpeedSequenceParallelConfig", "TorchContextParallelConfig"]

_STRATEGIES = ("allgather", "alltoall")
_PREFIX = "PARALLELISM_CONFIG_"


@suggest_keywords
@dataclass
class TorchContextParallelConfig:
    """How the ranks of a sequence exchange keys and values. None: use ``PARALLELISM_CONFIG_CP_COMM_STRATEGY``, else ``allgather``.

    ``allgather``: in one collective, after which each rank has the keys and values of one layer of all ranks for a moment.
    ``alltoall``: around a ring, so each rank has those of two ranks at a time.

    Raises:
        ConfigError: the strategy is unknown.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        variable = f"{_PREFIX}CP_COMM_STRATEGY"
        origin = (
            f"env {variable}" if self.cp_comm_strategy is None else "code TorchContextParallelConfig(cp_comm_strategy=)"
        )
        self.cp_comm_strategy = self.cp_comm_strategy or environ.get(variable) or "allgather"
        if self.cp_comm_strategy not in _STRATEGIES:
            raise ConfigError(
                f"cp_comm_strategy={self.cp_comm_strategy!r} is unknown",
                where=origin,
                do=f"use one of {', '.join(_STRATEGIES)}",
            )


@suggest_keywords
@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of Ulysses sequence parallelism, which echelon computes without DeepSpeed. None: use ``PARALLELISM_CONFIG_SP_*``.

    Raises:
        ConfigError: a value is unknown, or a fixed length has no value.
    """

    sp_seq_length: int | None = None
    """Length of all sequences, if it does not vary; others raise an error."""
    sp_seq_length_is_variable: bool | None = None
    """Whether the length differs between batches (default: True)."""
    sp_attn_implementation: str | None = None
    """Accepted for Accelerate's sake: attention is ``scaled_dot_product_attention``, which chooses the kernel."""

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            given = environ.get(f"{_PREFIX}SP_SEQ_LENGTH_IS_VARIABLE") or "true"
            self.sp_seq_length_is_variable = given.lower() == "true"
        if self.sp_seq_length is None:
            text = environ.get(f"{_PREFIX}SP_SEQ_LENGTH")
            self.sp_seq_length = None if text in (None, "", "None") else int(text)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigError(
                "sp_seq_length_is_variable=False needs sp_seq_length",
                where="code DeepSpeedSequenceParallelConfig()",
                do="set sp_seq_length to the number of positions of each sequence",
            )
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = environ.get(f"{_PREFIX}SP_ATTN_IMPLEMENTATION")
        if self.sp_attn_implementation in ("eager", "flex_attention"):
            raise ConfigError(
                f"sp_attn_implementation={self.sp_attn_implementation!r} is not supported",
                where="code DeepSpeedSequenceParallelConfig(sp_attn_implementation=)",
                do="use 'sdpa', or omit it",
            )
