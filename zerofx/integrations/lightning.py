"""`ZeroStrategy`: Lightning's strategy for several processes, whose modules zerofx shards."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch.plugins import (  # pyright: ignore[reportMissingImports]
    CheckpointIO,
    TorchCheckpointIO,
)
from lightning.pytorch.strategies import DDPStrategy  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.optim import Optimizer

import zerofx
from zerofx import checkpoint as sharded
from zerofx.checkpoint.damage import read_metadata
from zerofx.checkpoint.ranks import ranks_that_hold
from zerofx.checkpoint.writer import find
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError, UnsupportedError


class ZeroStrategy(DDPStrategy):
    """`Trainer(strategy=ZeroStrategy(ZeroConfig(stage=3)))`; nothing else of a program changes.

    The module is sharded and compiled in place, before its optimizer is made, for training and for
    evaluation. A checkpoint is a folder of `torch.distributed.checkpoint`: weights and optimizer
    state, and as its extra what Lightning has besides. It loads at any stage and on any ranks.

    Args:
        zero: stage and options, stage 3 by default.
        compile_kwargs: for `nn.Module.compile`: `dynamic`, `fullgraph`, `mode`.
        kwargs: those of `DDPStrategy` that are not DistributedDataParallel's.

    Raises:
        ConfigError: an argument is one of DistributedDataParallel's; names it.
        UnsupportedError: a callback averages weights, batch norms are to be synchronized, or a
            plugin or storage of one's own is to take checkpoints.
    """

    def __init__(
        self,
        zero: ZeroConfig | None = None,
        *,
        compile_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_rivals(kwargs)
        super().__init__(**kwargs)
        self._zero = zero or ZeroConfig()
        self._compile_kwargs = dict(compile_kwargs or {})

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Shards must be there before they are loaded."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The optimizer's state comes with the weights."""
        return False

    def setup(self, trainer: Any) -> None:
        """Shard and compile the module, then make its optimizer."""
        assert self.accelerator is not None and self.model is not None
        _refuse_averages(trainer.callbacks)
        _refuse_other_writers(self.checkpoint_io)
        if trainer.state.fn == "fit" and self._layer_sync is not None:
            _refuse_synced_norms(self.model)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if not any(param.is_meta for param in self.model.parameters()):
            self.model_to_device()
        zerofx.shard(self.model, self._zero)
        # Lightning calls methods of the module, which in turn call it or its children.
        for module in (self.model, *self.model.children()):
            if any(True for _ in module.parameters()):
                module.compile(backend=f"zero{self._zero.stage}", **self._compile_kwargs)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate without exchanging gradients, where that saves bytes; see `zerofx.no_sync`."""
        assert self.model is not None
        with zerofx.no_sync(self.model):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the weights from the module."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes it from the optimizer."""
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save rows of weights and optimizer state on each rank; `checkpoint` is the extra.

        With `save_weights_only` Lightning has no place for the optimizer's state in it: weights
        alone are saved then.
        """
        if storage_options is not None:
            raise UnsupportedError("ZeroStrategy takes no storage_options", "leave them out")
        assert self.model is not None
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        sharded.save(self.broadcast(filepath), self.model, optimizers, checkpoint)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` saved, at any stage and on any number of ranks.

        Of weights alone Lightning says itself that training does not resume.
        """
        assert self.model is not None
        path = self.broadcast(checkpoint_path)
        ranks = ranks_that_hold(self.model, "load_checkpoint")
        whole = ranks.agreed(lambda: _has_optimizer(path))
        return sharded.load(path, self.model, self.optimizers if whole else None)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` did it."""

    def teardown(self) -> None:
        """Leave the shards where they are."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _has_optimizer(path: str | os.PathLike[str]) -> bool:
    names = read_metadata(find(path)).state_dict_metadata
    return any(name.startswith("optimizer.") for name in names)


def _refuse_rivals(kwargs: Mapping[str, Any]) -> None:
    """What `DDPStrategy` hands on to DistributedDataParallel, which is not there."""
    hooks = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"}
    own = inspect.signature(DDPStrategy).parameters.keys() - {"kwargs"} - hooks
    names = [name for name, value in kwargs.items() if name not in own and value is not None]
    if names:
        raise ConfigError(
            "arguments of DistributedDataParallel have no effect in ZeroStrategy",
            "leave them out: unused parameters are no error, and ZeroConfig has its own options, "
            "such as quantize_gradients, bucket_bytes and broadcast_buffers",
            names,
        )


def _refuse_averages(callbacks: Iterable[Any]) -> None:
    """Those of Lightning copy the module before it is sharded, and save ranks' rows of averages."""
    kinds = {"WeightAveraging", "StochasticWeightAveraging"}
    classes = [type(each) for each in callbacks]
    names = [each.__name__ for each in classes if kinds & {c.__name__ for c in each.__mro__}]
    if names:
        raise UnsupportedError(
            "callbacks average weights",
            "copy.deepcopy the module in on_fit_start of a callback of your own, average the "
            "copy's parameters in on_train_batch_end, and save it by zerofx.checkpoint.save",
            names,
        )


def _refuse_other_writers(io: CheckpointIO) -> None:
    if type(io) is not TorchCheckpointIO:  # Lightning's default, which only deletes here
        raise UnsupportedError(
            f"checkpoint_io is a {type(io).__name__}, and rows are written and read by zerofx",
            "leave it out; zerofx.checkpoint.async_save, in a callback of your own, writes while "
            "training goes on",
        )


def _refuse_synced_norms(module: nn.Module) -> None:
    """torch's decide by values how they go on, in the middle of a graph; CPUs have none."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    raise UnsupportedError(
        "sync_batchnorm=True has batch norms share their statistics over ranks",
        "leave it out: each rank then normalizes by its own batch; or use GroupNorm or LayerNorm, "
        "which need no other rank",
        [name for name, each in module.named_modules() if isinstance(each, kinds)],
    )
