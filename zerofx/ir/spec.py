"""Plain frozen data: how parameters lie on the mesh.

Sizes are in elements unless the name ends in `_bytes`.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import torch

from zerofx.ir.parcels import Codec


class Tier(enum.Enum):
    """The memory that holds a value at rest."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


class Region(enum.Enum):
    """The part of a training step that a program covers."""

    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"
    OPTIMIZER = "optimizer"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a group of parameters lies on the mesh.

    Attributes:
        handle: the integer under which runtime and markers find groups and options.
        num_shards: ranks along the shard axis; 1 for replicated parameters.
        num_replicas: ranks that hold the same shard.
        resident: a full copy stays on every rank (stages 1 and 2); the shard is a view into it,
            unless the full value has another dtype.
        reduce_dtype: in which gradients travel and are averaged; by default each in its own.
        grad_dtype: in which they wait for the optimizer; by default in their parameter's.
        node_size: neighbours along the shard axis that share a node, equally many on each node; of
            replicated parameters, along the axis of replicas.
        replica_node_size: replicas of a shard that share a node, equally many on each node.
        secondary: the ranks of a node keep a second shard each of gathered values (hpZ).
        secondary_codes: of values that travel as codes they keep the codes.
    """

    handle: int
    num_shards: int
    num_replicas: int
    resident: bool
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    node_size: int = 1
    replica_node_size: int = 1
    secondary: bool = False
    secondary_codes: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return self.num_shards * self.num_replicas

    @property
    def num_nodes(self) -> int:
        """Nodes that the shard axis spans."""
        return max(1, self.num_shards // self.node_size)

    @property
    def sharded(self) -> bool:
        """Whether a rank owns only a part, `Shard(0)`; otherwise `Replicate()`."""
        return self.num_shards > 1

    @property
    def reduced_over(self) -> str:
        """Mesh axes that gradients cross: `shard`, `replicate`, or one after the other."""
        if not self.sharded:
            return "replicate"
        return "shard, replicate" if self.num_replicas > 1 else "shard"

    @property
    def temporary(self) -> bool:
        """Whether full values exist for a moment only: gathered, then freed."""
        return self.sharded and not self.resident

    @property
    def replicas_apart(self) -> bool:
        """Whether what replicas send each other leaves their node: a ring has one way only."""
        together = self.replica_node_size if self.sharded else self.node_size
        return together < self.num_replicas

    def sent_across(self, sent_bytes: int, *, reduces: bool) -> int:
        """Of the bytes that a rank sends in a collective, those that leave its node, in two hops.

        In chunks of `1 / num_shards`: a gather or a reduce-scatter sends `num_shards - 1`, one of
        them to each other node.
        """
        if not self.sharded:
            return sent_bytes if self.replicas_apart else 0
        repeated = 2 * (self.num_replicas - 1) / self.num_replicas if reduces else 0
        across = self.num_shards // self.node_size - 1 + repeated * self.replicas_apart
        return round(sent_bytes * across / (self.num_shards - 1 + repeated))

    @property
    def name(self) -> str:
        """What the printer shows: `shard4`, `shard2x2.resident`, `shard4.node2`, `replicate4`."""
        if not self.sharded:
            return f"replicate{self.num_replicas}"
        replicas = f"x{self.num_replicas}" if self.num_replicas > 1 else ""
        more = f".node{self.node_size}" if self.secondary else ".resident" if self.resident else ""
        return f"shard{self.num_shards}{replicas}{more}"


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter, tied names included.

    Attributes:
        name: the first fully qualified name.
        index: position in registration order, the same on all ranks.
        shape: the true, global shape.
        dtype: of the parameter at rest.
        trainable: whether it has `requires_grad`, of a program: when it was traced.
        layout: how it lies on the mesh.
        tied: its other names.
        tier: the memory that holds the shard at rest.
        owners: classes of the modules that hold it, by name: `Embedding`, `Linear`.
        param_dtype: what the option of this name asks of the full value; `None`: nothing.
        secondary_codec: how its secondary shards are written; empty: as numbers.
    """

    name: str
    index: int
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    layout: Layout
    tied: tuple[str, ...] = ()
    tier: Tier = Tier.DEVICE
    owners: tuple[str, ...] = ()
    param_dtype: torch.dtype | None = None
    secondary_codec: str = ""

    @property
    def cast(self) -> torch.dtype | None:
        """Dtype of the full value if it is not the one at rest: shards are cast, then gathered."""
        return None if self.param_dtype is self.dtype else self.param_dtype

    @property
    def full_dtype(self) -> torch.dtype:
        """The dtype that the model computes with."""
        return self.cast or self.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which a rank holds its part of the gradient."""
        return self.layout.grad_dtype or self.dtype

    @property
    def numel(self) -> int:
        """Elements of the full value."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one row, that is of one index of dim 0."""
        return math.prod(self.shape[1:])

    @property
    def chunk_rows(self) -> int:
        """Rows per rank with padding; the same on every rank."""
        return -(-self.shape[0] // self.layout.num_shards) if self.shape else 1

    @property
    def padded_numel(self) -> int:
        """Elements of the full value with padding: what a gather receives."""
        if not self.layout.sharded:
            return self.numel
        return self.chunk_rows * self.layout.num_shards * self.row_numel

    @property
    def secondary_numel(self) -> int:
        """Elements of a rank's secondary shard, which has no padding but at the very end."""
        return -(-self.numel // self.layout.node_size) if self.layout.secondary else 0

    @property
    def secondary_bytes(self) -> int:
        """Bytes of a rank's secondary shard; in codes, the parcels of one rank for each node."""
        if not self.secondary_codec or not self.layout.secondary:
            return self.secondary_numel * self.full_dtype.itemsize
        codec = Codec.parse(self.secondary_codec)
        blocks = -(-self.chunk_rows * self.row_numel // codec.block)
        return self.layout.num_nodes * codec.parcel_bytes(blocks)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full value with padding."""
        return self.padded_numel * self.full_dtype.itemsize

    def rows(self, shard: int) -> tuple[int, int]:
        """First and past-the-last row that rank `shard` of the shard axis owns (no padding)."""
        return rows_of(self.shape[0], self.layout.num_shards, shard)

    def shard_shape(self, shard: int) -> torch.Size:
        """Shape of the shard that rank `shard` owns."""
        if not self.layout.sharded:
            return self.shape
        start, stop = self.rows(shard)
        return torch.Size((stop - start, *self.shape[1:]))


def rows_of(num_rows: int, num_shards: int, shard: int) -> tuple[int, int]:
    """First and past-the-last of `num_rows` that rank `shard` of the shard axis owns."""
    chunk = -(-num_rows // num_shards)
    start = min(shard * chunk, num_rows)
    return start, min(start + chunk, num_rows)
