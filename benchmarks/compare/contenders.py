"""Who takes part, each as its own documentation says it is fastest.

A contender takes a model that every rank built alike and returns a function that trains it by one
step. To add one, write such a function here and put `@contender` on it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.compare.zoo import Batch, Workload

Step = Callable[[Batch], Tensor]
Prepare = Callable[[Workload, float], Step]
PrepareStage = Callable[..., Step]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: how to call it.
        prepare: from a model and a learning rate to a step.
        traffic: parameters sent per step by the formula of its ZeRO stage, in units of (W−1)/W of
            all parameters; 0 for the floor, whose ranks do not speak.
        rtol: how far its losses may be from the others'.
    """

    name: str
    prepare: Prepare
    traffic: int
    rtol: float = 5e-4

    @property
    def averages(self) -> bool:
        """Whether its ranks train one model, so that its losses are those of the others."""
        return self.traffic > 0

    @property
    def exact(self) -> bool:
        """Whether it computes what training in fp32 computes, but for rounding."""
        return self.rtol < 1e-3


_TITAN = "torchtitan.experiments.graph_trainer"
CONTENDERS: dict[str, Contender] = {}

_BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
_ALL_BUT_NORMS = {"quantize_exact": "*norm*"}
_WEIGHTS = {"quantize_weights": "int8"}
_GRADIENTS = {"quantize_gradients": ("int8", "int4")}
_INT4 = {"quantize_weights": "int4x64", "quantize_gradients": "int4"}
_SECONDARY = {"secondary_shards": True}
ZEROPP: dict[str, dict[str, Any]] = {
    "codes": _WEIGHTS | _GRADIENTS,
    "codes_embed": _WEIGHTS | {"quantize_gradients": "int4"} | _ALL_BUT_NORMS,
    "codes_int4": _INT4 | _ALL_BUT_NORMS,
    "all": _WEIGHTS | _GRADIENTS | _SECONDARY,
    "all_embed": _WEIGHTS | _GRADIENTS | _SECONDARY | _ALL_BUT_NORMS,
    "bf16": _BF16,
    "bf16_qwz": _BF16 | _WEIGHTS | _ALL_BUT_NORMS,
    "bf16_hpz": _BF16 | _SECONDARY,
    "bf16_qgz": _BF16 | _GRADIENTS | _ALL_BUT_NORMS,
    "bf16_codes": _BF16 | _WEIGHTS | {"quantize_gradients": "int4"} | _ALL_BUT_NORMS,
    "bf16_all": _BF16 | _WEIGHTS | _GRADIENTS | _SECONDARY | _ALL_BUT_NORMS,
    "bf16_all_int4": _BF16 | _INT4 | _SECONDARY | _ALL_BUT_NORMS,
}


def contender(name: str, *, traffic: int, rtol: float = 5e-4) -> Callable[[Prepare], Prepare]:
    """Enter a function into the table."""

    def enter(prepare: Prepare) -> Prepare:
        CONTENDERS[name] = Contender(name, prepare, traffic, rtol)
        return prepare

    return enter


def stages(name: str, *numbers: int) -> Callable[[PrepareStage], PrepareStage]:
    """Enter a function into the table once for each ZeRO stage: `zero1`, `zero2`."""

    def enter(prepare: PrepareStage) -> PrepareStage:
        for stage in numbers:
            one = functools.partial(prepare, stage=stage)
            contender(f"{name}{stage}", traffic=3 if stage == 3 else 2)(one)
        return prepare

    return enter


@contender("compute", traffic=0)
def compute(model: Workload, lr: float) -> Step:
    """The floor: every rank for itself, on the same machine at the same time."""
    return _loop(torch.compile(model), _adamw(model, lr))


@stages("zero", 0, 1, 2, 3)
def zerofx(model: Workload, lr: float, stage: int, options: dict[str, Any] | None = None) -> Step:
    """zerofx: nothing sharded, optimizer state, gradients as well, everything."""
    optimizer = _adamw(model, lr)
    return _loop(torch.compile(model, backend=f"zero{stage}", options=options), optimizer)


for _name, _options in ZEROPP.items():
    _prepare = functools.partial(zerofx, stage=3, options=_options)
    contender(f"zero3_{_name}", traffic=3, rtol=2e-2)(_prepare)


@contender("ddp", traffic=2)
def ddp(model: Workload, lr: float) -> Step:
    """DistributedDataParallel, compiled as a whole (torch splits the graph at its buckets)."""
    wrapped = _ddp(model)
    return _loop(torch.compile(wrapped), _adamw(wrapped, lr))


@contender("ddp_zero1", traffic=2)
def ddp_zero1(model: Workload, lr: float) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = _ddp(model)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        AdamW,
        # torch: sends parameters in buckets instead of one by one.
        parameters_as_bucket_view=True,
        lr=lr,
        fused=True,
    )
    return _loop(torch.compile(wrapped), optimizer)


@contender("fsdp2", traffic=3)
def fsdp2(model: Workload, lr: float) -> Step:
    """FSDP2 on each block and on the root, op by op."""
    _fully_shard(model)
    return _loop(model, _adamw(model, lr))


@contender("fsdp2_compile", traffic=3)
def fsdp2_compile(model: Workload, lr: float) -> Step:
    """FSDP2 with each block compiled, as torchtitan does."""
    for block in model.blocks():
        block.compile(fullgraph=True)
    return fsdp2(model, lr)


@contender("simple_fsdp", traffic=3)
def simple_fsdp(model: Workload, lr: float) -> Step:
    """torchtitan's SimpleFSDP, compiled by Inductor."""
    return _simple_fsdp(model, lr, "inductor")


@contender("simple_fsdp_buckets", traffic=3)
def simple_fsdp_buckets(model: Workload, lr: float) -> Step:
    """SimpleFSDP with torchtitan's pass that buckets and reorders by blocks."""
    config = _peer(f"{_TITAN}.configs").GraphTrainerCompileConfig(
        mode="jit", backend="inductor", passes=["transformer_block_bucketing"]
    )
    build_backend = _peer(f"{_TITAN}.jit_backend").get_compile_backend_with_passes
    return _simple_fsdp(model, lr, build_backend(config, _buckets(model)))


@stages("deepspeed", 1, 2, 3)
def deepspeed(model: Workload, lr: float, stage: int) -> Step:
    """DeepSpeed."""
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only counts; batches come from us
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        # The same optimizer as everyone's, which DeepSpeed shards but does not know.
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    engine, *_ = _peer("deepspeed").initialize(
        model=model, optimizer=_adamw(model, lr), config=config
    )
    engine.compile()

    def step(batch: Batch) -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _ddp(model: Workload) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fully_shard(model: Workload) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(_device(model).type, (dist.get_world_size(),))
    for module in [*model.blocks(), model]:
        fully_shard(module, mesh=mesh)


def _simple_fsdp(model: Workload, lr: float, backend: Any) -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(_device(model).type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    sharded = _peer(f"{_TITAN}.simple_fsdp").data_parallel(model, mesh, mode="fully_shard")
    sharded.compile(backend=backend, fullgraph=True)
    # Gradients are summed: torchtitan divides the loss by the tokens of all ranks.
    return _loop(sharded, _adamw(sharded, lr), share=1 / dist.get_world_size())


def _buckets(model: Workload) -> list[list[str] | str]:
    """Names of the modules to bucket: every block, and what stands beside them."""
    beside = {child for child in model.children() if not isinstance(child, nn.ModuleList)}
    wanted = {*model.blocks(), *beside}
    return [name for name, module in model.named_modules() if module in wanted]


def _peer(name: str) -> Any:
    """A module of the `bench` extra, which those who check types need not have installed."""
    return importlib.import_module(name)


def _adamw(model: nn.Module, lr: float) -> AdamW:
    return AdamW(model.parameters(), lr=lr, fused=True)


def _loop(forward: Callable[..., Tensor], optimizer: Optimizer, share: float = 1.0) -> Step:
    """The usual loop; gradients are dropped at its end, so that steps begin and end alike."""

    def step(batch: Batch) -> Tensor:
        loss = forward(*batch)
        (loss if share == 1.0 else loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
