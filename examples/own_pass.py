"""Three passes of one's own: what travels together, what stays, and what that costs.

    torchrun --nproc-per-node 2 examples/own_pass.py

A small transformer is trained with zerofx's pipeline, then with the three passes in it. They change
when bytes move and which of them; the losses stay the same to the last bit. docs/passes.md explains
every part of a pass.
"""

import argparse
import dataclasses
import itertools
import logging
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from kit.world import World, join
from torch import Tensor, fx, nn

import zerofx
from zerofx.passes import Editor, Program, Region, facts, ops
from zerofx.passes.buckets import Bucket, BucketPlan
from zerofx.passes.fuse_unshards import FuseUnshards

log = logging.getLogger("own_pass")


@dataclasses.dataclass(frozen=True)
class BucketByModule(FuseUnshards):
    """All parameters below one module are gathered together, whatever they weigh.

    It plans differently and applies what it planned as `fuse_unshards` does.

    Attributes:
        depth: of the modules: 2 makes `blocks.0` a bucket.
    """

    depth: int = 2

    name: ClassVar[str] = "bucket_by_module"

    def plan(self, program: Program) -> BucketPlan:
        """Group neighbouring gathers by the module that owns the parameter."""

        def place(start: fx.Node) -> tuple[str, ...]:
            return tuple(facts(start).param.split(".")[:-1][: self.depth])

        buckets: list[Bucket] = []
        for path, group in itertools.groupby(program.calls(ops.UNSHARD_START), key=place):
            starts = tuple(group)
            size = sum(program.params[facts(start).param].full_bytes for start in starts)
            if len(starts) > 1:
                buckets.append(Bucket(".".join(path), starts, size, "one module"))
        return BucketPlan(tuple(buckets))


@dataclasses.dataclass(frozen=True)
class KeepNorms(zerofx.Pass):
    """Weights of normalisations stay whole from forward to backward instead of being freed.

    They are small, and a gather costs its latency however few bytes it moves.

    Attributes:
        pattern: names of the parameters, as for files.
    """

    pattern: str = "*norm*"

    name: ClassVar[str] = "keep_norms"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD,))

    def plan(self, program: Program) -> tuple[fx.Node, ...]:
        """Find the frees of parameters that backward reads again."""
        return tuple(
            free
            for free in program.calls(ops.FREE)
            if fnmatch(facts(free).param, self.pattern) and facts(free).param in program.read_later
        )

    def apply(self, edit: Editor, plan: tuple[fx.Node, ...]) -> None:
        """Put a `keep` in the place of each."""
        for free in plan:
            full, layout = free.args
            assert isinstance(full, fx.Node)
            _, shard, _ = full.args
            edit.call_before(free, ops.KEEP, (full, shard, layout), facts(free))
            edit.erase(free)


@dataclasses.dataclass(frozen=True)
class LogBuckets(zerofx.Pass):
    """Say what each collective moves; nothing is edited."""

    name: ClassVar[str] = "log_buckets"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD, Region.BACKWARD))

    def plan(self, program: Program) -> tuple[str, ...]:
        """One line for each collective, in the order in which they are issued."""
        lines: list[str] = []
        for start in program.calls(ops.UNSHARD_START, ops.REDUCE_START):
            verb = "gathers" if ops.is_call(start, ops.UNSHARD_START) else "reduces"
            known = facts(start)
            what = known.bucket or known.param
            lines.append(f"{program.region.value:8} {verb} {known.wire_bytes:6} B  {what}")
        return tuple(lines)

    def apply(self, edit: Editor, plan: tuple[str, ...]) -> None:
        """Log the lines."""
        for line in plan:
            log.info(line)


PASSES = (
    zerofx.replace("fuse_unshards", BucketByModule()),
    zerofx.after("insert_frees", KeepNorms()),
    LogBuckets(),  # at the end, where nothing changes any more
)


class Block(nn.Module):
    """A transformer's feed-forward half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """A residual step; the shape stays."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Some blocks, and a normalisation."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean squared error."""
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.norm(x), target)


def train(world: World, steps: int, passes: Sequence[Any], inner: str) -> list[float]:
    """Losses of a few steps; the same seed on every rank, other data."""
    torch.manual_seed(0)
    model = Tower(width=32, depth=3).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # `min_shard_numel=0`: in a model as small as this, normalisations would not be sharded.
    options = {"inner": inner, "min_shard_numel": 0, "passes": passes}
    step = torch.compile(model, backend="zero3", options=options)
    data = torch.Generator().manual_seed(world.rank)
    losses: list[float] = []
    for _ in range(steps):
        x, target = torch.randn(2, 16, 32, generator=data).to(world.device)
        loss = step(x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args(argv)
    with join() as world:
        logging.basicConfig(format="%(message)s", level="WARNING")
        log.setLevel("INFO" if world.leads else "WARNING")
        plain = train(world, args.steps, (LogBuckets(),), args.inner)
        if world.leads:
            print("losses", *(f"{loss:.6f}" for loss in plain), flush=True)
        own = train(world, args.steps, PASSES, args.inner)
        if world.leads:
            print("losses", *(f"{loss:.6f}" for loss in own), "with own passes", flush=True)
        assert own == plain, "passes that move bytes do not change numbers"


if __name__ == "__main__":
    main()
