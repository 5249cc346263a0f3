"""``ParallelismConfig``: the number of ranks on each mesh axis, and options of the axes, under Accelerate's names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.base.errors import ConfigError, UsageError
from echelon.base.keywords import suggest_keywords
from echelon.config.plugin_arguments import plugin_arguments
from echelon.config.sources import refuse_misspelled
from echelon.world.mesh import AXES, DATA_AXES, LOSS_AXES, MeshLayout

_SIZES = tuple(f"{axis}_size" for axis in (*AXES, "ep"))
_BACKENDS = {"cp_backend": "torch", "sp_backend": "deepspeed"}
_STRATEGIES = ("allgather", "alltoall")
_PREFIX = "parallelism_config_"


@suggest_keywords
@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism, for ``ParallelismConfig(tp_handler=)``.

    Raises:
        ConfigError: an option has the wrong type, or is not supported.
    """

    enable_async_tp: bool = False
    """Not supported, as in Accelerate."""
    plan: dict[str, Any] | None = None
    """Styles by pattern of module names, such as ``{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}``. A style is an object from
    ``torch.distributed.tensor.parallel`` or a name as in the ``tp_plan`` of transformers' models; ``"replicate"`` keeps a layer
    whole. The patterns are added to the model's own plan, and take precedence. None: only the model's own plan."""
    loss_parallel: bool = False
    """Whether cross-entropy works on logits that stay split over the vocabulary, without gathering them. The plan must leave them
    split: ``{"lm_head": "colwise_loss_parallel"}``."""

    canonical_chunks: int | None = None
    """With ``parity="bitwise"``, the number of parts into which each split dimension is divided, the same in every run that must match
    bit for bit: a power of two that divides the heads, features and vocabulary, and is at least ``tp_size``. With a ``tp_handler``,
    one rank (``tp_size=1``) computes the same parts. Default: 8."""

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise ConfigError(
                "enable_async_tp=True is not supported",
                where="code TorchTensorParallelConfig(enable_async_tp=)",
                do="remove it",
            )
        chunks = self.canonical_chunks
        if chunks is not None and (not isinstance(chunks, int) or chunks < 1 or chunks & (chunks - 1)):
            raise ConfigError(
                f"canonical_chunks={chunks!r} is no power of two, so the sums over the chunks have no binary tree",
                where="code TorchTensorParallelConfig(canonical_chunks=)",
                do="set 1, 2, 4, 8 or a larger power of two",
            )
        if self.plan is not None and not (
            isinstance(self.plan, dict) and all(isinstance(key, str) for key in self.plan)
        ):
            raise ConfigError(
                f"plan is not a dict with patterns of module names as keys, but {self.plan!r}",
                where="code TorchTensorParallelConfig(plan=)",
                do="pass a dict such as {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}",
            )


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


@suggest_keywords
@dataclass
class ParallelismConfig:
    """The number of ranks on each device mesh axis. None: use the setting ``parallelism_config_*``, else 1.

    The mesh has the axes ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``sp`` and ``tp``, from the outermost to the innermost one,
    which joins neighbouring ranks. ``ep_size`` is no further axis: the ranks of dp_shard x cp x sp also divide the experts of
    mixture-of-experts layers, in groups of ``ep_size`` neighbours. The model has ``dp_replicate_size`` copies, each split into
    ``dp_shard_size`` shards; each layer is split over ``tp_size`` ranks (see ``TorchTensorParallelConfig``); sequences are
    cut over ``cp_size`` or ``sp_size`` ranks (see ``Accelerator.context_parallel``).

    Raises:
        ConfigError: a size is below 1, a backend is unknown, or axes are mutually exclusive.
    """

    dp_replicate_size: int = None  # type: ignore[assignment]
    dp_shard_size: int = None  # type: ignore[assignment]
    tp_size: int = None  # type: ignore[assignment]
    cp_size: int = None  # type: ignore[assignment]
    cp_backend: str = None  # type: ignore[assignment]
    sp_size: int = None  # type: ignore[assignment]
    sp_backend: str = None  # type: ignore[assignment]
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: Any = None
    sp_handler: Any = None
    pp_size: int = None  # type: ignore[assignment]
    ep_size: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        # Not fields, so that comparison and repr ignore them.
        self.device_mesh: DeviceMesh | None = None
        self._joint: dict[str, DeviceMesh] = {}
        refuse_misspelled("PARALLELISM_CONFIG_")
        names = (*_SIZES, *_BACKENDS)
        settings = plugin_arguments(self, {name: f"parallelism_config_{name}" for name in names})
        settings.fill(self, names)
        for name in _SIZES:
            given = getattr(self, name)
            setattr(self, name, settings.typed(name, 1 if given is None else given))
        for name, only in _BACKENDS.items():
            backend = getattr(self, name) or only
            if backend != only:
                raise ConfigError(
                    f"{name}={backend!r} is unknown", where=str(settings.origin(name)), do=f"use {only!r}, or omit it"
                )
            setattr(self, name, backend)
        if self.cp_enabled and self.sp_enabled:
            raise ConfigError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both split sequences", do="set one of them to 1"
            )
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        if self.sp_enabled and self.sp_handler is None:
            self.sp_handler = DeepSpeedSequenceParallelConfig()

        if self.tp_handler is not None and not isinstance(self.tp_handler, TorchTensorParallelConfig):
            raise ConfigError(
                f"tp_handler is a {type(self.tp_handler).__name__}",
                where="code ParallelismConfig(tp_handler=)",
                do="pass a TorchTensorParallelConfig, or omit it",
            )

    def __repr__(self) -> str:
        shown = {**asdict(self), "total_size": self.total_size}
        return f"ParallelismConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def to_json(self) -> str:
        """Return the settings as JSON (Accelerate: None)."""
        return json.dumps(asdict(self), default=vars)

    def check_covers(self, world_size: int) -> None:
        """Check that this layout matches ``world_size`` ranks; a layout in which all sizes are 1 always does.

        Raises:
            ConfigError: the axes cannot be combined, the experts cannot be divided, or the product of the sizes differs.
        """
        self._check_experts()
        if self.total_size not in (1, world_size):
            rest, left = divmod(world_size, self.total_size // self.dp_shard_size)
            fitting = "" if left else f"set dp_shard_size={rest}, or "
            shown = dict.fromkeys(("dp_replicate", "dp_shard", *self.active_mesh_dims))
            raise ConfigError(
                f"parallelism_config {' x '.join(f'{axis}_size={self._size(axis)}' for axis in shown)} = "
                f"{self.total_size} does not cover {world_size} processes",
                where="code Accelerator(parallelism_config=)",
                do=f"{fitting}start {self.total_size} processes",
            )

    def _check_experts(self) -> None:
        num_holders = self.dp_shard_size * self.cp_size * self.sp_size
        if num_holders % self.ep_size:
            raise ConfigError(
                f"ep_size={self.ep_size} does not divide dp_shard_size={self.dp_shard_size} x cp_size={self.cp_size} x "
                f"sp_size={self.sp_size} = {num_holders}; experts are divided among the ranks that shard the model",
                where="code Accelerator(parallelism_config=)",
                do=f"set dp_shard_size to a multiple of {self.ep_size}, or ep_size to a divisor of {num_holders}",
            )
        others = [f"{axis}_size={self._size(axis)}" for axis in ("tp", "pp") if self._size(axis) > 1]
        if self.ep_enabled and others:
            raise ConfigError(
                f"ep_size={self.ep_size} with {' and '.join(others)} is not supported: experts are neither split inside nor divided "
                "among pipeline stages",
                where="code Accelerator(parallelism_config=)",
                do="set ep_size=1, or shard the model with dp_shard_size instead",
            )

    def mesh_layout(self, *, rank: int) -> MeshLayout:
        """Return the position of ``rank`` on each axis."""
        return MeshLayout(sizes=tuple(map(self._size, AXES)), rank=rank)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the mesh of all axes larger than 1 and the joint axes ``dp``, ``dp_shard_cp`` and ``dp_cp``; None if
        there are none.

        Beside axes that are not data-parallel, ``dp_shard`` is in the mesh with any size, and ``sp`` is a part of the joint
        axes, because ranks with pieces of one sequence hold the same parameters.

        Collective: call on every rank.
        """
        always = ("dp_shard",) if self.non_dp_dim_names else ()
        axes = [axis for axis in AXES if self._size(axis) > 1 or axis in always]
        if not axes:
            return None
        mesh: Any = init_device_mesh(device_type, tuple(map(self._size, axes)), mesh_dim_names=tuple(axes))
        joint = {"dp": DATA_AXES, "dp_shard_cp": ("dp_shard", "cp", "sp"), "dp_cp": LOSS_AXES}
        for name, members in joint.items():
            parts = [axis for axis in axes if axis in members]
            if parts:
                self._joint[name] = mesh[tuple(parts)]._flatten(name)
        found: DeviceMesh = mesh
        return found

    def parameter_mesh(self) -> DeviceMesh:
        """Return the part of the mesh over whose last axis parameters are sharded; a first of two axes replicates them.

        Only for meshes with axes that are not data-parallel, after ``get_device_mesh``.
        """
        mesh: Any = self.device_mesh
        assert mesh is not None
        assert self.non_dp_dim_names
        if not self.cp_enabled and not self.sp_enabled:
            return mesh["dp_replicate", "dp_shard"] if self.dp_replicate_enabled else mesh["dp_shard"]  # type: ignore[no-any-return]
        shard = self._joint["dp_shard_cp"]
        if not self.dp_replicate_enabled:
            return shard
        if hasattr(DeviceMesh, "_concatenate"):  # since torch 2.10, where slicing by the name of a joint axis warns
            joined: DeviceMesh = DeviceMesh._concatenate([mesh["dp_replicate"], shard])
            return joined
        return mesh["dp_replicate", "dp_shard_cp"]  # type: ignore[no-any-return]

    def build_expert_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the mesh of the experts' parameters; None without expert parallelism.

        It has the same ranks in the same order as the other mesh. ``ep`` and ``efsdp`` take the place of dp_shard x cp x sp: neighbouring
        ranks hold different experts, and each expert is sharded over ``efsdp`` and replicated over ``dp_replicate``.

        Collective: call on every rank.
        """
        if not self.ep_enabled:
            return None
        num_holders = self.dp_shard_size * self.cp_size * self.sp_size
        shape = (self.dp_replicate_size, num_holders // self.ep_size, self.ep_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "efsdp", "ep"))

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh; the first call with a device type creates it.

        Collective: the first call.

        Raises:
            UsageError: there is no mesh and no device type was passed, or the mesh has a different device type.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise UsageError("there is no device mesh yet", do="pass the device type, such as 'cuda'")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            raise UsageError(
                f"the device mesh was created for {self.device_mesh.device_type!r}, not {device_type!r}",
                do="use the same device type",
            )
        return self.device_mesh

    def _size(self, axis: str) -> int:
        size: int = getattr(self, f"{axis}_size")
        return size

    def _above_one(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._size(axis) > 1]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether several groups of ranks each hold a copy of the model."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether the model is sharded."""
        return self.dp_shard_size > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the layers are divided into stages (pipeline parallelism)."""
        return self.pp_size > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split (tensor parallelism)."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split for ring attention (context parallelism)."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split, with attention computed by heads (sequence parallelism)."""
        return self.sp_size > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are divided among ranks (expert parallelism)."""
        return self.ep_size > 1

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes larger than 1 on which ranks have different samples."""
        return self._above_one("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes larger than 1 on which ranks have the same samples."""
        return self._above_one("pp", "tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes larger than 1 across which parameters are sharded."""
        return self._above_one("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes larger than 1 across which the loss is averaged."""
        return self._above_one("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The mesh axes passed to ``fully_shard``; they always include the joint shard axis."""
        return [*self._above_one("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes above 1."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def total_size(self) -> int:
        """The number of ranks, which is the product of all sizes."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks with different samples."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks with the same samples."""
        return self.pp_size * self.tp_size * self.cp_size * self.sp_size
