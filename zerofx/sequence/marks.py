"""Which inputs are sequences: a mark on the tensor itself, which its copies do not have."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

from zerofx.errors import ConfigError, DivergedError, UnsupportedError
from zerofx.runtime.collectives import as_bytes
from zerofx.sequence.cuts import Cut
from zerofx.torch_private import all_positions, why_graph_ended

_DIM = "zerofx_sequence_dim"
_PART = "zerofx_part_of_a_sequence"


def mark_sequence(*inputs: Tensor, dim: int = 1) -> None:
    """Say that a dimension of inputs runs along the sequence, for `sequence_parallel`.

    Every rank of a sequence is given the whole of it; the program takes the rank's part. Token ids
    are enough: what meets them along the sequence is cut with them. Mark each batch before the
    compiled model is called; copies, such as `.to(device)` makes, are not marked.

    Args:
        inputs: whole sequences.
        dim: of their positions.

    Raises:
        ConfigError: an input is no tensor, or does not have the dimension.
    """
    for each in inputs:
        if not isinstance(each, Tensor):
            raise ConfigError(
                f"mark_sequence was given a {type(each).__name__}",
                'pass tensors one by one: mark_sequence(batch["input_ids"], batch["labels"])',
            )
        if not -each.ndim <= dim < each.ndim:
            raise ConfigError(
                f"mark_sequence was given dim={dim} of a tensor of shape {tuple(each.shape)}",
                "name the dimension along which its positions lie",
            )
        setattr(each, _DIM, dim % each.ndim)


def set_part(value: Any, cut: Cut, group: str) -> None:
    """Remember that a program returned this rank's part."""
    setattr(value, _PART, (cut.dim, cut.outer, group))


def is_part(value: Any) -> bool:
    """Whether a program returned this very tensor as a rank's part."""
    return hasattr(value, _PART)


def gather_sequence(part: Tensor) -> Tensor:
    """The whole of an output that is this rank's part, such as logits, without a gradient.

    The ranks of a sequence call it together.

    Args:
        part: what the compiled model returned; copies of it are not known as parts.

    Raises:
        ConfigError: it is none.
    """
    if not is_part(part):
        raise ConfigError(
            f"gather_sequence was given a tensor of shape {tuple(part.shape)} that no "
            "program returned as a part of a sequence",
            "call it on what the compiled model returns, before anything else is done with that",
        )
    return all_positions(part.detach(), *getattr(part, _PART))


def sequences(
    module: fx.GraphModule, inputs: Sequence[Any], params: Container[int]
) -> dict[int, int]:
    """The marked inputs of a graph: the dimension of each, by position.

    Args:
        module: Dynamo's graph.
        inputs: its real inputs.
        params: positions of parameters.

    Raises:
        UnsupportedError: the graph is a piece of a forward, or an input asks for a gradient.
        ConfigError: no input is marked.
    """
    reason, _ = why_graph_ended(module)
    if reason or any(map(is_part, inputs)):
        raise UnsupportedError(
            "sequence_parallel: Dynamo breaks the forward into several graphs, and what passes "
            f"between them would be taken for whole: {reason or 'a part came back'}",
            "write the forward so that torch.compile(model, fullgraph=True) takes it; "
            "`zerofx explain` shows where it breaks",
        )
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    found: dict[int, int] = {}
    for place, value in enumerate(inputs):
        if not isinstance(value, Tensor) or place in params:
            continue
        if value.requires_grad:
            raise UnsupportedError(
                "sequence_parallel: an input asks for a gradient, of which each rank has a share",
                "give the compiled model the parameters that it comes from, or detach it; if the "
                "forward computes it, Dynamo broke that: torch.compile(model, fullgraph=True) says "
                "where",
                [names[place]],
            )
        if (dim := getattr(value, _DIM, None)) is not None:
            found[place] = dim
    if not found:
        raise ConfigError(
            "sequence_parallel: no input of the compiled model is marked as a sequence",
            "call zerofx.mark_sequence(input_ids) on what you pass, after it is on its device",
        )
    return found


def refuse_other_samples(inputs: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """See that the ranks of a sequence were given the same; they come together.

    Raises:
        DivergedError: they were not.
    """
    mine = hashlib.sha256()
    for each in inputs:
        mine.update(as_bytes(each.detach().cpu()).numpy().tobytes())
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine.digest(), group)
    if len(set(found)) > 1:
        raise DivergedError(
            "sequence_parallel: ranks that share a sequence were given different ones",
            "deal samples out to groups of neighbouring ranks, as "
            "DistributedSampler(num_replicas=world // P, rank=rank // P) does",
        )
