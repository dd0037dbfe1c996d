"""`backend="zero"`: the lowest stage that fits, by the plan of the model at hand."""

from __future__ import annotations

import collections
import json
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx, nn

from zerofx.config import Stage, ZeroConfig
from zerofx.cost.comm import Algorithms, algorithms_for
from zerofx.cost.machine import Machine, machine_of
from zerofx.cost.memory import FP32_ADAM
from zerofx.cost.tables import CommTable, topology
from zerofx.errors import ConfigError, ShardingError
from zerofx.frontend.rehearsal import Rehearsal, rehearse_graph
from zerofx.frontend.resident import rest_of
from zerofx.frontend.views import coded_in, forecast_of
from zerofx.option_checks import at_stage
from zerofx.runtime.arrivals import Arrivals
from zerofx.runtime.axes import replicas_of
from zerofx.runtime.comm import backend_for, node_size_of
from zerofx.runtime.members import members, new_key, ranks_of
from zerofx.runtime.network import kept_table, ranks_of_a_node
from zerofx.torch_private import default_store

_log = logging.getLogger(__name__)
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


def choose_stage(
    module: fx.GraphModule, inputs: Sequence[Any], root: nn.Module, config: ZeroConfig
) -> Stage:
    """The lowest stage whose predicted memory fits every rank; 3, with a warning, if none does.

    The first rank decides, from its own graph and the least memory of all ranks; the others take
    its word from the process group's store. Every rank of the mesh must call it.

    Args:
        module: Dynamo's graph of the plain model.
        inputs: its real inputs.
        root: the model.
        config: options; the stage does not count.

    Raises:
        ShardingError: the first rank failed.
        ConfigError: ranks share sequences, which plans know nothing of.
    """
    refuse_shared_sequences(config, 'backend="zero"', 'name the stage, as in backend="zero3"')
    device = next(root.parameters()).device
    if not dist.is_available() or not dist.is_initialized():
        return 0  # sharding will say what is missing
    ranks, store = members(config.mesh), default_store()
    key, first = new_key("choice", ranks), ranks[0]
    mine = [socket.gethostname(), _memory_bytes(device, config), device.type == "cpu"]
    arrivals = Arrivals(key, store, ranks, "the choice of a stage", config.hang_timeout)
    arrivals.come(dist.get_rank(), json.dumps(mine))
    if dist.get_rank() != first:
        answer = arrivals.hear(key)
        if not answer.isdigit():
            raise ShardingError(
                f"rank {first} could not choose a stage: {answer}", "see its own error"
            )
        return cast(Stage, int(answer))
    try:
        offers = [json.loads(text) for text in arrivals.all_say()]
        room = least_memory(offers, given=config.device_memory is not None)
        with torch.inference_mode(False), torch.enable_grad():  # one may evaluate first
            how = {"inner": config.inner, "cast": config.param_dtype, "evaluated": True}
            rehearsal = rehearse_graph(module, inputs, root, **how)
        stage = _decide(rehearsal, config, room)
    except Exception as error:
        store.set(key, f"{type(error).__name__}: {error}")
        raise
    store.set(key, str(stage))
    return stage


def refuse_shared_sequences(config: ZeroConfig, what: str, remedy: str) -> None:
    """Raise where ranks would share sequences, which plain models know nothing of.

    Args:
        config: the options.
        what: was asked for.
        remedy: what to do instead.

    Raises:
        ConfigError: they would.
    """
    if config.sequence_parallel > 1:
        raise ConfigError(
            f"option sequence_parallel does not go with {what}, which plans whole sequences",
            remedy,
        )


def least_memory(offers: Sequence[tuple[str, int, bool]], *, given: bool) -> int:
    """Bytes of the rank that has least; CPU ranks of one host share its memory.

    Args:
        offers: of each rank its host, bytes of its device, and whether that is the host's memory.
        given: the user said how much a rank may use.
    """
    neighbours = collections.Counter(host for host, _, _ in offers)
    return min(
        size // neighbours[host] if is_host and not given else size
        for host, size, is_host in offers
    )


def predicted_peaks(
    rehearsal: Rehearsal,
    config: ZeroConfig,
    num_ranks: int,
    algorithms: Algorithms,
    machine: Machine | None = None,
) -> dict[Stage, int]:
    """Bytes of a rank at the peak of a step, by stage, with AdamW.

    Args:
        rehearsal: of the model.
        config: options; those that have no meaning at a stage do not count there.
        num_ranks: W.
        algorithms: which calls move a bucket.
        machine: where it trains; by default a typical one.
    """
    peaks: dict[Stage, int] = {}
    for stage in _STAGES:
        chosen, many = at_stage(config, stage), config.accumulate > 1
        programs = rehearsal.programs(chosen, num_ranks, machine=machine)
        _, resident = rest_of(
            rehearsal.params,
            chosen,
            num_ranks,
            precision=FP32_ADAM,
            buffers=rehearsal.buffer_bytes,
            device=rehearsal.device.type,
            coded=coded_in([programs]),
            accumulates=many,
        )
        fused = config.inner == "inductor"
        forecast, _ = forecast_of(programs, resident, algorithms, fused=fused, accumulates=many)
        peaks[stage] = forecast.peak(1).total
    return peaks


def _decide(rehearsal: Rehearsal, config: ZeroConfig, room: int) -> Stage:
    num_ranks = len(ranks_of(config.mesh))
    group = dist.group.WORLD
    assert group is not None
    device = rehearsal.device
    algorithms = algorithms_for(backend_for(group, device), device.type, num_ranks, num_ranks)
    machine = machine_of(device.type, _kept_table(config, group, device, num_ranks))
    peaks = predicted_peaks(rehearsal, config, num_ranks, algorithms, machine)
    listed = ", ".join(f"zero{stage} {peak / 1e9:.3g} GB" for stage, peak in peaks.items())
    fitting: list[Stage] = [stage for stage, peak in peaks.items() if peak <= room]
    if not fitting:
        _log.warning("zero3, but no stage fits into %.3g GB: predicted %s", room / 1e9, listed)
        return 3
    _log.info("zero%d is the first to fit into %.3g GB: %s", fitting[0], room / 1e9, listed)
    return min(fitting)


def _kept_table(
    config: ZeroConfig, group: dist.ProcessGroup, device: torch.device, num_ranks: int
) -> CommTable | None:
    """What `zerofx bench comm` kept for the axis that will shard: buckets go by it."""
    shards = num_ranks // replicas_of(config, num_ranks)
    node_size = node_size_of(range(shards), ranks_of_a_node(config.ranks_per_node, num_ranks))
    version, backend = str(torch.__version__), backend_for(group, device)
    return kept_table(topology(backend, device.type, shards, node_size, version))


def _memory_bytes(device: torch.device, config: ZeroConfig) -> int:
    """What a rank may use on its device, the plain model's own memory included."""
    if config.device_memory is not None:
        return config.device_memory
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
