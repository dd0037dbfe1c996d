"""`ZeroConfig`: every choice a user can make, validated in one place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerofx.errors import ConfigError, nearest
from zerofx.option_checks import refuse_contradictions, refuse_wrong_values

Stage = Literal[0, 1, 2, 3]
Inner = Literal["inductor", "eager"]


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
            sharding. By default a 1-D mesh over all ranks. A 1-D mesh of some ranks makes a model
            of these alone: others may train another one, or a part of this one at the same time.
        replicate: number of replica groups when no mesh is given (hybrid sharding, the world size
            must be a multiple of it): each group of `world_size // replicate` neighbouring ranks
            holds one whole set of shards.
        sequence_parallel: neighbouring ranks that share each sequence: they are given the same
            batch, and each computes its part of the positions. Inputs say by
            `zerofx.mark_sequence` where their sequence lies. It divides the number of ranks; by
            default every rank is alone.
        ranks_per_node: neighbours in the order of ranks that share a node. Where several do on each
            of several nodes, messages travel in two hops, so that each byte crosses between nodes
            once (gloo on CPUs; NCCL sees to it by itself). It divides the number of ranks; fewer
            than one node takes share it all. By default what torchrun started on rank 0's node.
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
        max_replicated_numel: elements that all those parameters together may have; if they have
            more, the largest of them are sharded, too. By default there is no such bound.
        bucket_bytes: parameters are gathered, and gradients reduced, in buckets of about this many
            bytes of full values; neighbouring layers share one if they fit. 0: each alone. By
            default 16 MiB, or an eighth of the parameters that a graph reads if that is less.
        prefetch_bytes: most bytes of gathered values at stage 3, from the start of a gather to its
            free; of codes, until they are read. What a layer needs at once is gathered in any case,
            and as much may be gathered ahead. By default as much as it takes to gather one bucket
            of values ahead of every use.
        memory_budget: bytes of full values that stage 3 may keep from forward to backward instead
            of gathering them again, besides the last bucket of forward, which backward needs first:
            that alone is kept by default. 0: nothing, strictly. The graphs of one forward (a graph
            break, blocks compiled alone) share the budget: as one begins, what earlier ones kept
            goes, oldest first, until it fits beside what this one keeps.
        keep_freed_memory: on CPUs, have glibc keep the memory that this process frees instead of
            giving it back to the system, which would map it anew in every step. It holds for the
            whole process, and for good; no more is kept than was once in use.
        device_memory: bytes that a rank may use: the backend `zero` chooses the stage by it. By
            default what its GPU has free or, on CPUs, the host's memory divided by its ranks.
        param_dtype: dtype of full values, and so of computation, gathers and gradients before their
            reduction. Parameters at rest, `.grad` and optimizer state keep their own dtype: that is
            the master copy. Buffers do not follow, nor do parameters of modules whose statistics
            are buffers (BatchNorm), which compute in the dtype of those. By default nothing is
            cast.
        reduce_dtype: dtype in which gradients travel and are averaged; each mean is then cast to
            its parameter's dtype. By default gradients travel as they are computed.
        grad_dtype: dtype of `.grad`, from backward to the optimizer's step, which sees gradients in
            their parameters' dtype. Several backwards of one step add up in it. By default the
            parameter's dtype.
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
    sequence_parallel: int = 1
    ranks_per_node: int | None = None
    secondary_shards: bool | Literal["codes"] = False
    accumulate: int = 1
    broadcast_buffers: bool = True
    min_shard_numel: int = 512
    max_replicated_numel: int | None = None
    bucket_bytes: int | None = None
    prefetch_bytes: int | None = None
    memory_budget: int | None = None
    keep_freed_memory: bool = True
    device_memory: int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
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
    hang_timeout: float = dataclasses.field(default=10.0, compare=False)
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

    def least_sharded(self, numels: Iterable[int]) -> int:
        """The number of elements from which on parameters are sharded.

        Args:
            numels: elements of each parameter of the model.
        """
        least, total = max(1, self.min_shard_numel), 0
        if self.max_replicated_numel is None:
            return least
        for numel in sorted(each for each in numels if each < least):
            total += numel
            if total > self.max_replicated_numel:
                return numel
        return least

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
        for name in ("disable", "passes", "quantize_exact"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        if isinstance(self.quantize_gradients, list):
            object.__setattr__(self, "quantize_gradients", _as_tuple(self.quantize_gradients))
        if isinstance(self.dump, os.PathLike):
            object.__setattr__(self, "dump", os.fspath(self.dump))
        refuse_wrong_values(self)
        refuse_contradictions(self)


def config_from_options(stage: Stage, options: Mapping[str, Any] | None) -> ZeroConfig:
    """Translate the `options=` of `torch.compile` for the backend `zero{stage}`.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), two names of one option, or a
            stage that contradicts the backend's name.
    """
    given = in_own_names(_dictionary(options))
    base = given.pop("config", None)
    if base is not None and not isinstance(base, ZeroConfig):
        raise ConfigError(f"option config={base!r} is not a ZeroConfig", "pass zerofx.ZeroConfig()")
    refuse_unknown(given)
    if base is None:
        return ZeroConfig(stage=stage, **given)
    if base.stage != stage:
        raise ConfigError(
            f'backend="zero{stage}" contradicts config.stage={base.stage}',
            f'use backend="zero{base.stage}" or ZeroConfig(stage={stage})',
        )
    return dataclasses.replace(base, **given)


def _dictionary(options: Any) -> Mapping[str, Any]:
    if options is None or isinstance(options, Mapping):
        return cast("Mapping[str, Any] | None", options) or {}
    shorter = 'options={"config": ZeroConfig(…)}' if isinstance(options, ZeroConfig) else "a dict"
    raise ConfigError(f"options={options!r} is no dictionary", f"write {shorter}")


def in_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of which ZeRO++'s have the names that DeepSpeed gave them, in zerofx's names.

    Raises:
        ConfigError: a value that DeepSpeed's name cannot have, or another one under zerofx's name.
    """
    own = {name: value for name, value in options.items() if name not in ZERO_PLUS_PLUS}
    for name, meaning in ZERO_PLUS_PLUS.items():
        value = options.get(name)
        if value is None:
            continue
        switch = name != "zero_hpz_partition_size"
        if isinstance(value, bool) is not switch or not isinstance(value, int) or value < 0:
            wanted = "True or False" if switch else "an integer of at least 0"
            raise ConfigError(f"option {name}={value!r} is not allowed", f"use {wanted}")
        for option, meant in meaning(value).items():
            if own.setdefault(option, meant) != meant:
                said = f"{option}={own[option]!r}"
                raise ConfigError(f"option {name}={value} contradicts {said}", "give one of them")
    return own


ZERO_PLUS_PLUS: dict[str, Callable[[int], dict[str, Any]]] = {
    "zero_quantized_weights": lambda on: {"quantize_weights": "int8"} if on else {},
    "zero_quantized_gradients": lambda on: {"quantize_gradients": "int4"} if on else {},
    "zero_hpz_partition_size": lambda ranks: (
        {"secondary_shards": True, "ranks_per_node": ranks} if ranks > 1 else {}
    ),
}
"""What DeepSpeed's settings of ZeRO++ mean, by their names."""


def refuse_unknown(options: Iterable[str]) -> None:
    """Refuse names that are no fields of `ZeroConfig`, or the stage.

    Raises:
        ConfigError: names the nearest known one.
    """
    fields = {field.name for field in dataclasses.fields(ZeroConfig)}
    known = fields - {"stage"}
    for key in options:
        if key not in known:
            hint = nearest(str(key), {*fields, *ZERO_PLUS_PLUS})
            if "'stage'" in hint:
                hint = 'the backend names the stage, as in backend="zero2"; '
            raise ConfigError(f"unknown option {key!r}", f"{hint}known: {', '.join(sorted(known))}")


def differences(sharded: ZeroConfig, now: ZeroConfig) -> list[str]:
    """Options of a model that was sharded with others, a line each."""
    return [
        f"sharded with {field.name}={one!r}, now with {field.name}={other!r}"
        for field in dataclasses.fields(ZeroConfig)
        if field.compare
        and (one := getattr(sharded, field.name)) != (other := getattr(now, field.name))
    ]


def _as_tuple(value: Any) -> Any:
    """A list, or one string, as a tuple; anything else as it is."""
    if isinstance(value, list):
        return tuple(cast("list[Any]", value))
    return (value,) if isinstance(value, str) else value
