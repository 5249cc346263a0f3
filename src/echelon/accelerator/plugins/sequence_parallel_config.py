"""Settings of context parallelism (``cp_handler``) and sequence parallelism (``sp_handler``), under Accelerate's names."""

from __future__ import annotations

from dataclasses import dataclass, fields

from echelon.base.errors import ConfigError
from echelon.base.keywords import suggest_keywords
from echelon.config.plugin_arguments import plugin_arguments

__all__ = ["DeepSpeedSequenceParallelConfig", "TorchContextParallelConfig"]

_STRATEGIES = ("allgather", "alltoall")
_PREFIX = "parallelism_config_"


@suggest_keywords
@dataclass
class TorchContextParallelConfig:
    """How the ranks of a sequence exchange keys and values. None: use the setting, else ``allgather``.

    ``allgather``: in one collective, after which each rank has the keys and values of one layer of all ranks for a moment.
    ``alltoall``: around a ring, so each rank has those of two ranks at a time.

    Raises:
        ConfigError: the strategy is unknown.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        settings = plugin_arguments(self, {"cp_comm_strategy": f"{_PREFIX}cp_comm_strategy"})
        settings.fill(self, ["cp_comm_strategy"])
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in _STRATEGIES:
            raise ConfigError(
                f"cp_comm_strategy={self.cp_comm_strategy!r} is unknown",
                where=str(settings.origin("cp_comm_strategy")),
                do=f"use one of {', '.join(_STRATEGIES)}",
            )


@suggest_keywords
@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of Ulysses sequence parallelism, which echelon computes without DeepSpeed. None: use the setting.

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
        names = [f.name for f in fields(self)]
        settings = plugin_arguments(self, {name: _PREFIX + name for name in names})
        settings.fill(self, names)
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigError(
                "sp_seq_length_is_variable=False needs sp_seq_length",
                where=str(settings.origin("sp_seq_length_is_variable")),
                do="set sp_seq_length to the number of positions of each sequence",
            )
        if self.sp_attn_implementation in ("eager", "flex_attention"):
            raise ConfigError(
                f"sp_attn_implementation={self.sp_attn_implementation!r} is not supported",
                where=str(settings.origin("sp_attn_implementation")),
                do="use 'sdpa', or omit it",
            )
