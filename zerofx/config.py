"""`ZeroConfig`: every choice a user can make, validated in one place."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerofx.errors import ConfigError

Stage = Literal[0, 1, 2, 3]
Inner = Literal["inductor", "eager"]
_FLOATS = "None or a floating-point torch.dtype of at least 16 bits, such as torch.bfloat16"


def _dump_from_environment() -> str:
    return os.environ.get("ZEROFX_DUMP", "")


def cache_folder() -> Path:
    """Where measurements of this machine are kept: `ZEROFX_CACHE`, by default `~/.cache/zerofx`."""
    return Path(os.environ.get("ZEROFX_CACHE") or Path.home() / ".cache" / "zerofx")


@dataclasses.dataclass(frozen=True)
class ZeroConfig:
    """How one model is sharded, transformed and run.

    Attributes:
        stage: ZeRO stage; 0 is plain data parallelism through the same program.
        inner: what runs the compute between collectives: `inductor`, or `eager` (op by op, the
            oracle for numerics).
        mesh: the data-parallel device mesh; 1-D `(shard,)`, or 2-D `(replicate, shard)` for hybrid
            sharding. By default a 1-D mesh over all ranks.
        replicate: number of replica groups when no mesh is given (hybrid sharding, the world size
            must be a multiple of it): each group of `world_size // replicate` neighbouring ranks
            holds one whole set of shards.
        ranks_per_node: neighbours in the order of ranks that share a node. Where several do on each
            of several nodes, messages travel in two hops, so that each byte crosses between nodes
            once (gloo on CPUs; NCCL sees to it by itself). By default what torchrun started on
            rank 0's node.
        secondary_shards: stage 3 keeps a second shard of every gathered value inside each node, in
            the dtype of computation, so that backward, and later micro-batches of an accumulation
            (`accumulate`, `no_sync`), gather inside the node (hpZ of ZeRO++). It costs the size of
            the model divided by the ranks of a node; there must be several nodes of several ranks.
            `codes`: of what `quantize_weights` gathers, the codes that arrived are kept, as they
            are, and gathered again: a quarter of the memory and of the bytes inside the node.
        accumulate: number of backward passes per optimizer step. Stages 0 and 1 then send gradients
            once per `accumulate` backwards and hold the full local sum meanwhile; stages 2 and 3
            reduce every time, since their gradients are sharded at rest, but replica groups share
            them once (MiCS).
        broadcast_buffers: rank 0's buffers win before each forward, as in DistributedDataParallel.
        min_shard_numel: parameters with fewer elements, and scalars, stay replicated; their
            gradients are all-reduced.
        bucket_bytes: parameters are gathered, and gradients reduced, in buckets of about this many
            bytes of full values; neighbouring layers share one if they fit. 0: each alone. By
            default 16 MiB, or an eighth of all parameters if that is less.
        prefetch_bytes: most bytes of gathered values at stage 3, from the start of a gather to its
            free. What a layer needs at once is gathered in any case, and as much may be gathered
            ahead. By default as much as it takes to gather one bucket ahead of every use.
        memory_budget: bytes of full values that stage 3 may keep from forward to backward instead
            of gathering them again. 0: none, strictly. By default the last bucket of forward, which
            backward needs first, is kept, and nothing else.
        device_memory: bytes that a rank may use: the backend `zero` chooses the stage by it. By
            default what its GPU has free or, on CPUs, the host's memory divided by its ranks.
        param_dtype: dtype of full values, and so of computation, gathers and gradients before their
            reduction. Parameters at rest, `.grad` and optimizer state keep their own dtype: that is
            the master copy. All parameters follow, buffers do not. By default nothing is cast.
        reduce_dtype: dtype in which gradients travel and are averaged; each mean is then cast to
            its parameter's dtype. By default gradients travel as they are computed.
        quantize: `auto`: codes travel only where they save more time on the link than their kernels
            take, as the cost model finds for each graph; rank 0 decides. The codecs are those of
            `quantize_weights` and `quantize_gradients`, or `int8` for both if neither is given. By
            default codes travel wherever those two ask for them.
        quantize_weights: gathers of stage 3 send codes (qwZ of ZeRO++): `int8`, `int4` or `fp8`, if
            need be with block size and kind, as in `int8x128.asymmetric`. By default numbers travel
            as they are.
        quantize_gradients: reductions send codes (qgZ of ZeRO++): a codec as above, which
            `.stochastic` may end, or two of them: inside a node, and between nodes. `.feedback`
            comes last: what coding takes is kept, in a byte a number, and added the next time.
        quantize_exact: what stays exact although other parameters are quantized: patterns (globs,
            upper and lower case alike) of names of parameters, or of classes that hold them. By
            default embeddings and norms. Parameters of one dimension always do.
        drift_every: how often codes are compared with the numbers that they stand for: every so
            many times that a bucket travels. Read by `zerofx.drift`. By default never.
        output_dtype: dtype to which floating-point outputs of the model's forward are cast.
        cast_forward_inputs: cast floating-point inputs of the model's forward to `param_dtype`.
        verify: check the program's rules after every pass.
        detect_anomaly: before every optimizer step, look for nan and inf in gradients and stop all
            ranks with the parameters' names. It reads every gradient, and waits for the device.
        disable: names of passes to leave out.
        passes: changes of the pipeline, in order: a pass (an instance) goes to the end,
            `zerofx.before`, `after`, `replace` and `without` name the place of another one.
        hang_timeout: seconds that a rank waits in a collective before it compares its
            program with the other ranks' and reports the difference; and of silence after which
            a rank counts as gone, once a collective failed.
        dump: folder into which rank 0 writes every program: as text after each pass, as data and
            as Python; by default the environment variable ZEROFX_DUMP. Empty: nothing is written.
        measure: the run of each program, counted from 0, that rank 0 times into its dump: its
            report then shows measured times beside the predicted ones. Needs `dump`. By default
            none.
    """

    stage: Stage = 3
    inner: Inner = "inductor"
    mesh: DeviceMesh | None = None
    replicate: int = 1
    ranks_per_node: int | None = None
    secondary_shards: bool | Literal["codes"] = False
    accumulate: int = 1
    broadcast_buffers: bool = True
    min_shard_numel: int = 512
    bucket_bytes: int | None = None
    prefetch_bytes: int | None = None
    memory_budget: int | None = None
    device_memory: int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    quantize: Literal["auto"] | None = None
    quantize_weights: str | None = None
    quantize_gradients: str | tuple[str, str] | None = None
    quantize_exact: str | tuple[str, ...] = ("*embed*", "*_emb*", "*norm*")
    drift_every: int | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    verify: bool = True
    detect_anomaly: bool = False
    disable: tuple[str, ...] = ()
    passes: tuple[Any, ...] = ()
    hang_timeout: float = 10.0
    dump: str = dataclasses.field(default_factory=_dump_from_environment, compare=False)
    measure: int | None = dataclasses.field(default=None, compare=False)

    @property
    def weight_codec(self) -> str | None:
        """Name of the codec of weights."""
        return "int8" if self._codecs_are_chosen and self.stage == 3 else self.quantize_weights

    @property
    def gradient_codecs(self) -> tuple[str, str] | None:
        """Names of the codecs of gradients: inside a node, or of the only hop; between nodes."""
        given = "int8" if self._codecs_are_chosen else self.quantize_gradients
        return (given, given) if isinstance(given, str) else given

    @property
    def _codecs_are_chosen(self) -> bool:
        return self.quantize == "auto" and self.quantize_weights is self.quantize_gradients is None

    @property
    def added_passes(self) -> tuple[str, ...]:
        """Names of the passes that users brought in."""
        # A change holds its pass as `new`; this module knows nothing of either class.
        passes = (getattr(each, "new", each) for each in self.passes)
        return tuple(str(getattr(each, "name", each)) for each in passes if each is not None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "disable", tuple(self.disable))
        object.__setattr__(self, "passes", tuple(self.passes))
        exact = self.quantize_exact
        exact = (exact,) if isinstance(exact, str) else tuple(exact)
        object.__setattr__(self, "quantize_exact", exact)
        if isinstance(self.quantize_gradients, list):
            object.__setattr__(self, "quantize_gradients", tuple(self.quantize_gradients))
        checks: list[tuple[bool, str, str]] = [
            (self.stage in (0, 1, 2, 3), "stage", "0, 1, 2 or 3"),
            (self.inner in ("inductor", "eager"), "inner", '"inductor" or "eager"'),
            (_is_count(self.replicate, 1), "replicate", "an integer of at least 1"),
            (
                self.ranks_per_node is None or _is_count(self.ranks_per_node, 1),
                "ranks_per_node",
                "None or an integer of at least 1",
            ),
            (_is_count(self.accumulate, 1), "accumulate", "an integer of at least 1"),
            (_is_count(self.min_shard_numel, 0), "min_shard_numel", "an integer of at least 0"),
            (_is_size(self.bucket_bytes), "bucket_bytes", "None or an integer of at least 0"),
            (_is_size(self.memory_budget), "memory_budget", "None or an integer of at least 0"),
            (_is_size(self.prefetch_bytes), "prefetch_bytes", "None or an integer of at least 0"),
            (_is_size(self.device_memory), "device_memory", "None or an integer of at least 0"),
            (_is_float(self.param_dtype), "param_dtype", _FLOATS),
            (_is_float(self.reduce_dtype), "reduce_dtype", _FLOATS),
            (_is_float(self.output_dtype), "output_dtype", _FLOATS),
            (self.quantize in (None, "auto"), "quantize", 'None or "auto"'),
            (
                self.secondary_shards in (False, True, "codes"),
                "secondary_shards",
                'False, True or "codes" (those of quantize_weights)',
            ),
            (
                _are_texts(self.quantize_weights or "", num=1),
                "quantize_weights",
                'None or a codec, such as "int8"',
            ),
            (
                _are_texts(self.gradient_codecs or ("", ""), num=2),
                "quantize_gradients",
                'None, a codec such as "int8", or two of them',
            ),
            (
                _are_texts(self.quantize_exact),
                "quantize_exact",
                'patterns of names, such as ("*embed*",)',
            ),
            (
                self.drift_every is None or _is_count(self.drift_every, 1),
                "drift_every",
                "None or an integer of at least 1",
            ),
            (_is_size(self.measure), "measure", "None or an integer of at least 0"),
            (self.hang_timeout > 0, "hang_timeout", "a positive number of seconds"),
        ]
        for good, name, wanted in checks:
            if not good:
                given = getattr(self, name)
                raise ConfigError(f"option {name}={given!r} is not allowed", f"use {wanted}")
        if self.drift_every is not None and self.weight_codec is self.gradient_codecs is None:
            raise ConfigError(
                "option drift_every has no meaning where nothing is quantized",
                "give quantize_weights or quantize_gradients, or leave it out",
            )
        if self.measure is not None and not self.dump:
            raise ConfigError(
                "option measure has no meaning without a dump", "give dump=folder too"
            )
        if self.mesh is not None and self.replicate != 1:
            raise ConfigError(
                "options mesh and replicate contradict each other",
                "give the 2-D mesh (replicate, shard) alone, or replicate=k alone",
            )
        if self.secondary_shards == "codes" and self.weight_codec is None and self.stage == 3:
            raise ConfigError(
                'option secondary_shards="codes" has no meaning where gathers send numbers',
                'set quantize_weights="int8" too, or use secondary_shards=True',
            )
        if self.secondary_shards and self.stage != 3:
            raise ConfigError(
                f"option secondary_shards={self.secondary_shards!r} has no meaning at stage "
                f"{self.stage}, where parameters are not sharded between forward and backward",
                'use backend="zero3", or leave secondary_shards out',
            )
        if self.mesh is not None and self.mesh.ndim not in (1, 2):
            raise ConfigError(
                f"option mesh has {self.mesh.ndim} axes",
                "use a 1-D mesh (shard,) or a 2-D mesh (replicate, shard)",
            )


def config_from_options(stage: Stage, options: Mapping[str, Any] | None) -> ZeroConfig:
    """Translate the `options=` of `torch.compile` for the backend `zero{stage}`.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), or a stage that contradicts
            the backend's name.
    """
    given = dict(options or {})
    base = given.pop("config", None)
    if base is not None and not isinstance(base, ZeroConfig):
        raise ConfigError(f"option config={base!r} is not a ZeroConfig", "pass zerofx.ZeroConfig()")
    known = {field.name for field in dataclasses.fields(ZeroConfig)} - {"stage"}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"unknown option {key!r}", f"{hint}known: {', '.join(sorted(known))}")
    if base is None:
        return ZeroConfig(stage=stage, **given)
    if base.stage != stage:
        raise ConfigError(
            f'backend="zero{stage}" contradicts config.stage={base.stage}',
            f'use backend="zero{base.stage}" or ZeroConfig(stage={stage})',
        )
    return dataclasses.replace(base, **given)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_texts(value: object, num: int | None = None) -> bool:
    """Whether it is a tuple of strings, `num` of them; a string counts as a tuple of itself."""
    texts = cast("tuple[Any, ...]", (value,) if isinstance(value, str) else value)
    are = isinstance(texts, tuple) and all(isinstance(each, str) for each in texts)  # pyright: ignore[reportUnnecessaryIsInstance]
    return are and num in (None, len(texts))


def _is_float(value: torch.dtype | None) -> bool:
    if value is None:
        return True
    # Users may pass anything, whatever the annotation says.
    return isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1  # pyright: ignore[reportUnnecessaryIsInstance]


def _is_size(value: object) -> bool:
    return value is None or _is_count(value, 0)
