"""What zerofx knows about a node: one frozen record under one key of `node.meta`.

Facts are written when a node is annotated or inserted and are never recovered from names.
"""

from __future__ import annotations

import dataclasses
import enum
import re

from torch import fx

from zerofx.ir.spec import Tier

NODE = "node"
"""The axis of the ranks that share a node, a part of `shard`."""

_KEY = "zerofx"
_BLOCK = re.compile(r"(?:[^.\d][^.]*\.)*?\d+(?=\.|$)")


class Role(enum.Enum):
    """What a node is to ZeRO."""

    COMPUTE = "compute"
    SHARD = "shard"
    BUFFER = "buffer"
    MESH = "mesh"
    SAVED = "saved"
    EFFECT = "effect"
    FULL = "full"
    GRAD = "grad"
    UNSHARD = "unshard"
    REDUCE = "reduce"
    FREE = "free"
    SYNC = "sync"


@dataclasses.dataclass(frozen=True)
class Facts:
    """One node's facts.

    Attributes:
        role: what the node is to ZeRO.
        param: name of the parameter or buffer it concerns.
        module: path of the module whose forward made it.
        layout: printed name of the parameter's layout.
        axis: mesh axis that its bytes cross: `shard`, `replicate`, of a reduction also
            `shard, replicate`; `NODE` for a gather from secondary shards.
        bucket: name of the bucket it belongs to.
        members: of a collective, the parameters that it moves, in order; `param` is then empty
            unless there is only one.
        wire_bytes: bytes that this rank sends.
        scale_bytes: of `wire_bytes`, those of the scales of codes.
        across_bytes: of the `wire_bytes` of codes, those that leave the node.
        exact: where others travel as codes, why these do not.
        tier: memory that holds the value.
        origin: pass that inserted it; empty for traced nodes.
    """

    role: Role = Role.COMPUTE
    param: str = ""
    module: str = ""
    layout: str = ""
    axis: str = ""
    bucket: str = ""
    members: tuple[str, ...] = ()
    wire_bytes: int = 0
    scale_bytes: int = 0
    across_bytes: int = 0
    exact: str = ""
    tier: Tier = Tier.DEVICE
    origin: str = ""


_NOTHING = Facts()


def facts(node: fx.Node) -> Facts:
    """The record of `node`; an empty one if nothing is known."""
    return node.meta.get(_KEY, _NOTHING)


def set_facts(node: fx.Node, record: Facts) -> None:
    """Attach `record` to `node`."""
    node.meta[_KEY] = record


def block_of(module: str) -> str:
    """The outermost numbered module of a path: `layers.3` of `layers.3.mlp`; else empty."""
    found = _BLOCK.match(module)
    return found[0] if found else ""


def module_path(node: fx.Node) -> str:
    """The module whose forward made a node, by torch's own metadata; empty if it does not say."""
    meta = node.meta
    stack: dict[str, tuple[str, object]]
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path = str(next(reversed([path for path, _ in stack.values()]), ""))
    path = re.sub(r"^(L\['\w+'\])\[0\]", r"\1", path)  # a decorator's `args` begin with the model
    path = re.sub(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]", r".\1\2\3", path)
    return path.partition(".")[2].partition(".")[2] if path.startswith("L.") else path
