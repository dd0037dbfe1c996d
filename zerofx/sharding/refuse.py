"""What cannot be sharded, found before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zerofx.errors import UnsupportedError
from zerofx.runtime.handles import states_by_param
from zerofx.runtime.user_classes import class_like
from zerofx.sharding.overlaps import overlap, reach
from zerofx.torch_private import (
    PLAIN_RESULTS,
    fake_mode_of,
    is_made_of_tensors,
    past_recompile_limit,
    storage_key,
)

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

GIVE_PLAIN = (
    "pass the plain model; zerofx shards it itself, and docs/parallelism.md says how a model is "
    "divided for tensor parallelism"
)
"""The remedy where parameters are divided already."""


def refuse_wrappers(modules: Iterable[nn.Module]) -> None:
    """Refuse models that another library already distributes.

    Raises:
        UnsupportedError: names the wrapper.
    """
    for module in modules:
        if isinstance(module, _WRAPPERS):
            name = type(module).__name__
            raise UnsupportedError(
                f"the model is wrapped in {name}, which distributes it already",
                'pass the plain model to torch.compile(model, backend="zero3"), which takes the '
                "wrapper's place; under Accelerate, zerofx.integrations.Accelerator wraps nothing",
            )
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise UnsupportedError(
                f"{module.original_name} is a ScriptModule, which holds its weights in C++",
                "put the Python module there; torch.jit.script of functions works",
            )


def refuse_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters of kinds that cannot be sharded; all offenders are listed.

    Raises:
        UnsupportedError: names the parameters.
    """
    listed = list(named)
    rules: list[tuple[Callable[[nn.Parameter], bool], str, str]] = [
        (_is_lazy, "are not initialised", "run one forward of the lazy modules before compiling"),
        (
            _is_of_another_model,
            "belong to another model that is sharded",
            "shard models that share weights as one, before their first forwards: "
            "zerofx.shard(nn.ModuleList([one, other]), zerofx.ZeroConfig(stage=…))",
        ),
        (
            _is_dtensor,
            "are DTensors already",
            GIVE_PLAIN,
        ),
        (_is_sparse, "are sparse", "convert them with .to_dense()"),
        (
            _has_own_operations,
            "are of a class with operations of its own, which full values do not have",
            "make them plain nn.Parameters, and write in forward what the class does",
        ),
        (
            _is_of_closed_class,
            "are of a class that sharded parameters cannot be of as well",
            "leave its __slots__ and its metaclass out, or make them plain nn.Parameters",
        ),
        (_is_other_dtype, "are not real floating point", "make them buffers, or use float dtypes"),
    ]
    for applies, problem, remedy in rules:
        offenders = [f"{name} ({_kind(param)})" for name, param in listed if applies(param)]
        if offenders:
            raise UnsupportedError(f"parameters {problem}", remedy, offenders)
    devices = {str(param.device) for _, param in listed if not param.is_meta}
    if len(devices) > 1:
        raise UnsupportedError(
            f"parameters are on several devices: {', '.join(sorted(devices))}",
            "move the model to one device with model.to(device)",
            [f"{name} ({param.device})" for name, param in listed],
        )


def refuse_buffers(named: Iterable[tuple[str, Tensor]], *, again: bool) -> None:
    """Refuse buffers that rank 0's values cannot be written into.

    Args:
        named: all of the model.
        again: it is sharded already, and may have put its parameters' values into buffers.

    Raises:
        UnsupportedError: names the buffers.
    """
    listed = list(named)
    sparse = [f"{name} ({_kind(buffer)})" for name, buffer in listed if _is_sparse(buffer)]
    if sparse:
        raise UnsupportedError(
            "buffers are sparse, and ranks may hold other numbers of values in them",
            "make them attributes that are no buffers (self.adjacency = …), the same on every "
            "rank, or convert them with .to_dense()",
            sparse,
        )
    parts = [f"{name} ({_kind(buffer)})" for name, buffer in listed if _is_dtensor(buffer)]
    if parts and not again:
        raise UnsupportedError(
            "buffers are DTensors, and rank 0's part of them is not that of other ranks",
            "register whole values (.full_tensor()), or make them attributes that are no buffers",
            parts,
        )


def refuse_shared_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors that lie in the memory of others: shards lie apart, and would differ soon.

    Args:
        named: parameters and buffers, each once.

    Raises:
        UnsupportedError: names them.
    """
    placed = sorted(
        ((*_place(tensor), name, tensor) for name, tensor in named if _is_placed(tensor)),
        key=lambda each: each[:3],
    )
    shared: list[str] = []
    for number, (memory, start, one, first) in enumerate(placed):
        end = start + reach(first) * first.element_size()
        for elsewhere, begin, other, second in placed[number + 1 :]:
            if elsewhere != memory or begin >= end:
                break
            trains = isinstance(first, nn.Parameter) or isinstance(second, nn.Parameter)
            if trains and overlap(first, second):
                shared.append(" and ".join(sorted((one, other))))
    if shared:
        raise UnsupportedError(
            "parameters lie in the memory of other parameters or buffers",
            "tie them (decoder.weight = encoder.weight, the same object), give each a clone(), or "
            "compute the one from the other in forward",
            shared,
        )


def _is_placed(tensor: Tensor) -> bool:
    if isinstance(tensor, DTensor) or fake_mode_of([tensor]) is not None:
        return False
    return tensor.layout is torch.strided and tensor.nbytes > 0


def _place(tensor: Tensor) -> tuple[int, int]:
    """A storage that has no memory yet, or 0 for all that is there; and the bytes before it."""
    if tensor.is_meta:
        return storage_key(tensor), int(tensor.storage_offset()) * tensor.element_size()
    return 0, tensor.data_ptr()


def _kind(param: Tensor) -> str:
    return "uninitialised" if _is_lazy(param) else f"{param.dtype}, {param.layout}"


def _is_lazy(param: Tensor) -> bool:
    return nn.parameter.is_lazy(param)


def _is_dtensor(param: Tensor) -> bool:
    return isinstance(param, DTensor)


def _is_of_another_model(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) and id(param) in states_by_param()


def _is_sparse(param: Tensor) -> bool:
    return param.layout != torch.strided


def _has_own_operations(param: nn.Parameter) -> bool:
    function: Any = type(param).__torch_function__
    usual = PLAIN_RESULTS, Tensor.__torch_function__.__func__
    return is_made_of_tensors(param) or getattr(function, "__func__", function) not in usual


def _is_of_closed_class(param: nn.Parameter) -> bool:
    try:
        class_like(type(param))
    except TypeError:
        return True
    return False


def _is_other_dtype(param: nn.Parameter) -> bool:
    return param.dtype not in _FLOATS


def refuse_meta(model: nn.Module) -> None:
    """Refuse to shard in the middle of a forward over parameters that have no memory.

    Raises:
        UnsupportedError: names them.
    """
    lost = [name for name, param in nn.Module.named_parameters(model) if param.is_meta]
    if lost:
        raise UnsupportedError(
            "a forward runs while parameters are on the meta device",
            "call zerofx.shard(model, config) or zerofx.load_safetensors(model, path, config) "
            "before the first forward, and give the forward real inputs",
            lost,
        )


def refuse_past_recompile_limit(name: str, limit: int) -> None:
    """Refuse to read the parameter `name` eagerly where Dynamo stopped compiling.

    This rank would gather parameter by parameter, while others run their programs.

    Raises:
        UnsupportedError: names the function and the parameter.
    """
    function = past_recompile_limit(limit)
    if function:
        raise UnsupportedError(
            f"{function} was recompiled too often, so Dynamo runs it without zerofx's program",
            "find what changes with TORCH_LOGS=recompiles (a shape: torch.compile(…, dynamic=True) "
            "or torch._dynamo.mark_dynamic; a number that a module counts up, self.calls += 1: "
            "torch._dynamo.config.allow_unspec_int_on_nn_module = True; the model, where several "
            "are of one class; layers that are unfrozen one by one), or raise "
            "torch._dynamo.config.recompile_limit, or the argument of torch.compile",
            [name],
        )
