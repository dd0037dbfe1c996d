"""The list of passes for each stage: this page is the program."""

from __future__ import annotations

from zerofx.config import Stage, ZeroConfig
from zerofx.cost.tables import MOST_BUCKET_BYTES
from zerofx.errors import ConfigError
from zerofx.ir.parcels import Codec
from zerofx.passes.add_secondary_shards import AddSecondaryShards
from zerofx.passes.base import Pass
from zerofx.passes.cast_before_gather import CastBeforeGather
from zerofx.passes.changes import as_change, change_pipeline, unknown_pass
from zerofx.passes.copy_returned import CopyReturned
from zerofx.passes.fuse_reduces import FuseReduces
from zerofx.passes.fuse_unshards import FuseUnshards
from zerofx.passes.insert_frees import InsertFrees
from zerofx.passes.insert_reduces import InsertReduces
from zerofx.passes.insert_unshards import InsertUnshards
from zerofx.passes.keep_unsharded import KeepUnsharded
from zerofx.passes.merge_reduces import MergeReduces
from zerofx.passes.merge_unshards import MergeUnshards
from zerofx.passes.quantize_reduces import QuantizeReduces
from zerofx.passes.quantize_unshards import QuantizeUnshards
from zerofx.passes.schedule import Schedule
from zerofx.passes.sync_buffers import SyncBuffers

_STAGES: dict[int, tuple[Pass, ...]] = {
    0: (
        MergeUnshards(),  # one read per parameter
        MergeReduces(),  # tied weights: sum first, send once
        CopyReturned(),  # weights do not leave a program
        InsertUnshards(),  # replicated: the shard is the full value
        InsertReduces(place="end"),  # all-reduce
    ),
    1: (
        MergeUnshards(),
        MergeReduces(),
        CopyReturned(),
        InsertUnshards(),  # resident: gathered in place after an optimizer step
        InsertReduces(place="end"),  # full gradients live until backward ends
    ),
    2: (
        MergeUnshards(),
        MergeReduces(),
        CopyReturned(),
        InsertUnshards(),
        InsertReduces(place="ready"),  # each gradient dies as soon as it is reduced
    ),
    3: (
        MergeUnshards(),
        MergeReduces(),
        CastBeforeGather(),  # autocast: half the bytes
        CopyReturned(),
        InsertUnshards(),  # gathered where it is needed, forward and backward
        InsertReduces(place="ready"),
        InsertFrees(),  # and freed after its last reader
    ),
}


def _lossy(config: ZeroConfig) -> tuple[Pass, ...]:
    """What rounds, and is there only where the user asked for it."""
    listed: tuple[Pass, ...] = ()
    exact = tuple(config.quantize_exact)
    if config.quantize is not None:
        _needs_stage(config, "quantize", 1)
    if config.weight_codec is not None:
        _needs_stage(config, "quantize_weights", 3)
        codec = _codec("quantize_weights", config.weight_codec)
        if codec.rounding != "nearest" or codec.feedback:
            raise ConfigError(
                f"option quantize_weights={config.quantize_weights!r}: forward and backward would "
                "compute with different weights",
                "leave stochastic rounding and feedback to quantize_gradients",
            )
        listed += (QuantizeUnshards(codec.name, exact),)
    if config.gradient_codecs is not None:
        _needs_stage(config, "quantize_gradients", 1)
        inside, across = (_codec("quantize_gradients", each) for each in config.gradient_codecs)
        if inside.block != across.block:
            raise ConfigError(
                f"option quantize_gradients={config.quantize_gradients!r} has blocks of "
                f"{inside.block} and of {across.block} numbers",
                "use blocks of one size",
            )
        listed += (QuantizeReduces(inside.name, across.name, exact),)
    return listed


def _codec(option: str, text: str) -> Codec:
    try:
        return Codec.parse(text)
    except ConfigError as error:
        raise ConfigError(f"option {option}: {error.problem}", error.remedy) from None


def _needs_stage(config: ZeroConfig, option: str, least: Stage) -> None:
    if config.stage < least:
        raise ConfigError(
            f"option {option} has no meaning at stage {config.stage}",
            f'use backend="zero{least}"' + (" or higher" if least < 3 else ""),
        )


def _optional(config: ZeroConfig, most_bytes: int) -> tuple[Pass, ...]:
    """What makes a program fast; any of it can be left out."""
    return (
        FuseUnshards(target_bytes=config.bucket_bytes, most_bytes=most_bytes),
        FuseReduces(target_bytes=config.bucket_bytes, most_bytes=most_bytes),
        KeepUnsharded(budget_bytes=config.memory_budget),
        Schedule(prefetch_bytes=config.prefetch_bytes),
    )


def pipeline(config: ZeroConfig, most_bytes: int = MOST_BUCKET_BYTES) -> tuple[Pass, ...]:
    """The passes for `config`: mandatory ones, then optional ones, then what users changed.

    Args:
        config: stage, what is changed and what is disabled. Passes that hold for every model
            count only if `zerofx.passes.registry.with_registered` put them in.
        most_bytes: bound of buckets whose size was not asked for.

    Raises:
        ConfigError: `disable` or `passes` names no pass of the list, or `passes` holds something
            that is none; or quantization has no meaning at this stage.
    """
    listed = _STAGES[config.stage]
    if config.broadcast_buffers:
        listed += (SyncBuffers(),)
    listed += _lossy(config) + _optional(config, most_bytes)
    if config.secondary_shards:
        listed += (AddSecondaryShards(),)
    listed = change_pipeline(listed, [as_change(each) for each in config.passes])
    names = [each.name for each in listed]
    for name in config.disable:
        if name not in names:
            raise unknown_pass(name, names, "option disable")
    return tuple(each for each in listed if each.name not in config.disable)
