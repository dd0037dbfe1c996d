"""Point 1: what cannot be sharded is refused by name, with a remedy, and nothing is lost."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.contract.loops import (
    FAST,
    STAGES,
    Net,
    close,
    compiled,
    config,
    data,
    net,
    refused,
    still_plain,
    train,
)
from tests.ranks import run_ranks
from zerofx.errors import ConfigError, ShardingError, UnsupportedError


class _Odd(Net):
    """One more parameter, of a kind given."""

    def __init__(self, extra: Tensor, trainable: bool = False) -> None:
        super().__init__()
        self.extra = nn.Parameter(extra, requires_grad=trainable)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0 * self.extra.sum().real.to_dense()


def _parameters() -> None:
    cases: list[tuple[Tensor, str]] = [
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3, dtype=torch.int8), "int8"),
        (torch.eye(3).to_sparse(), "sparse"),
    ]
    for extra, word in cases:
        model = net(lambda extra=extra: _Odd(extra))
        with refused("extra", word, kind=UnsupportedError):
            zerofx.shard(model, config(3))
        still_plain(model)
        if word != "sparse":  # Dynamo itself has no sparse inputs
            with refused("extra", word, kind=UnsupportedError):
                compiled(model, 3)(*data(0))
            still_plain(model)
    model = net()
    model.register_buffer("links", torch.eye(3).to_sparse())
    with refused("links", "buffers are sparse", "to_dense", kind=UnsupportedError):
        compiled(model, 3)(*data(0))
    still_plain(model)
    links = model.links
    del model.links
    model.links = links  # the remedy
    whole = init_device_mesh("cpu", (dist.get_world_size(),))
    model.register_buffer("table", distribute_tensor(torch.eye(4), whole, [Shard(0)]))
    with refused("table", "buffers are DTensors", "full_tensor", kind=UnsupportedError):
        compiled(model, 3)(*data(0))
    still_plain(model)
    table = model.table
    del model.table
    model.table = table
    train(compiled(model, 3), torch.optim.SGD(model.parameters(), lr=0.1))


class _Soft(nn.Parameter):
    """Means the softplus of its values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], F.softplus(args[1].data), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


def _soft() -> None:
    model = net()
    model.first.weight = _Soft(model.first.weight.detach())
    with refused("first.weight", "operations of its own", kind=UnsupportedError):
        compiled(model, 3)(*data(0))
    assert type(model.first.weight) is _Soft


def test_parameters_that_mean_something_else() -> None:
    run_ranks(2, _soft)


def test_parameters_that_are_not_real_and_dense() -> None:
    run_ranks(2, _parameters)


def _places() -> None:
    with torch.device("meta"):
        nowhere = Net()
    with refused("first.weight", "meta device", "zerofx.shard", kind=UnsupportedError):
        compiled(nowhere, 3)(*(value.to("meta") for value in data(0)))
    nowhere.to_empty(device="cpu")
    with torch.no_grad():
        for param in nowhere.parameters():
            param.zero_()
    still_plain(nowhere)
    mixed = net()
    fake = FakeTensor(FakeTensorMode(), torch.empty(5, 13, device="meta"), torch.device("cuda:0"))
    mixed.last.weight = nn.Parameter(fake)
    with refused("last.weight (cuda:0)", "first.weight (cpu)", "model.to", kind=UnsupportedError):
        zerofx.shard(mixed, config(3))
    mixed.last = nn.Linear(13, 5)
    still_plain(mixed)
    lazy = nn.Sequential(nn.LazyLinear(5))
    with refused("0.weight", "not initialised", kind=UnsupportedError):
        zerofx.shard(lazy, config(3))
    lazy(data(0)[0]).sum().backward()


def test_meta_mixed_devices_and_lazy_parameters() -> None:
    run_ranks(2, _places)


def _others() -> None:
    for wrap in (lambda m: DistributedDataParallel(compiled(m, 3)), _compiled_ddp):
        model = net()
        wrapped = wrap(model)
        with refused("DistributedDataParallel", "plain model", kind=UnsupportedError):
            wrapped(*data(0))
        still_plain(model)
    with refused("DistributedDataParallel", kind=UnsupportedError):
        zerofx.shard(DistributedDataParallel(net()), config(3))
    model = fully_shard(net())
    with refused("FSDP", "plain model", kind=UnsupportedError):
        zerofx.shard(model, config(3))
    with refused("FSDP", "plain model", kind=UnsupportedError):
        compiled(model, 3)(*data(0))
    model, mesh = net(), init_device_mesh("cpu", (2,))
    weight = distribute_tensor(model.first.weight.detach(), mesh, [Shard(0)])
    model.first.weight = nn.Parameter(weight)
    with refused("first.weight", "DTensors already", kind=UnsupportedError):
        zerofx.shard(model, config(3))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with refused("  - 0.weight", "did not make", kind=UnsupportedError):
        compiled(model, 3)(torch.ones(2, 4))


def _compiled_ddp(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(DistributedDataParallel(model), backend="zero3", options=FAST)


def test_models_that_are_distributed_already() -> None:
    run_ranks(2, _others)


def _groups() -> None:
    model = net()
    inputs = data(0)
    mpi = patch.object(dist, "get_backend", return_value="mpi")
    with mpi, refused("MPI", "gloo", kind=UnsupportedError):
        compiled(model, 3)(*inputs)
    still_plain(model)
    no_group = patch.object(dist, "is_initialized", return_value=False)
    words = ("no default process group", "init_process_group")
    with no_group, refused(*words, kind=UnsupportedError):
        compiled(model, 3)(*inputs)
    still_plain(model)
    for backend in ("zero3", "zero"):
        nccl = patch.object(dist, "get_backend_config", return_value="cuda:nccl")
        run = torch.compile(model, backend=backend, options=FAST)
        with nccl, refused("on cpu", "cuda:nccl", "model.to(device)"):
            run(*inputs)
        still_plain(model)
        torch.compiler.reset()
    train(compiled(model, 3), torch.optim.SGD(model.parameters(), lr=0.1))


def test_process_groups() -> None:
    run_ranks(2, _groups)


def _options() -> None:
    model = net()
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"min_shard_numle": 3}, ("min_shard_numle", "did you mean 'min_shard_numel'")),
        ({"stage": 2}, ("stage",)),
        ({"config": zerofx.ZeroConfig(stage=2)}, ('backend="zero3"', "stage=2", '"zero2"')),
        ({"config": 3}, ("config=3", "ZeroConfig")),
        ({"inner": "triton"}, ("inner='triton'",)),
        ({"replicate": 3}, ("replicate=3", "divisor")),
        ({"disable": ("nothing",)}, ("nothing", "merge_unshards")),
    ]
    with pytest.raises(ConfigError) as caught:
        torch.compile(net(), backend="zero3", options={"inner": 3})(*data(0))
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ValueError) and str(again) == str(caught.value)
    assert again.remedy and type(again) is ConfigError
    for options, words in cases:
        torch._dynamo.reset()
        kind = UnsupportedError if "replicate" in options else ConfigError
        run = torch.compile(copy.deepcopy(model), backend="zero3", options=options)
        with refused(*words, kind=kind):
            run(*data(0))
    zerofx.shard(model, config(2))
    for stage, words in ((3, "stage=2"), (2, "accumulate=4")):
        torch._dynamo.reset()
        options = {**FAST, **({"accumulate": 4} if stage == 2 else {})}
        with refused("was sharded with", words, kind=UnsupportedError):
            torch.compile(model, backend=f"zero{stage}", options=options)(*data(0))
    with refused("sharded already", "stage=2, now with stage=3", kind=ShardingError):
        zerofx.shard(model, config(3))
    with refused("not sharded", "zerofx.shard", kind=ShardingError):
        zerofx.refresh(net())


def test_options() -> None:
    run_ranks(2, _options)


def _transforms(stage: int) -> None:
    model, x = net(), data(0)[0]
    plain = copy.deepcopy(model)
    zerofx.shard(model, config(stage))
    given = {name: param.detach() for name, param in plain.named_parameters()}
    mine = {name: param * 1.0 for name, param in model.named_parameters()}
    for params in (given, mine):
        got = torch.func.functional_call(model, params, data(0))
        close(got, plain(*data(0)), "functional_call")

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, params, data(0))

    got = torch.func.grad(loss)(given)
    plain(*data(0)).backward()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        close(got[name], param.grad, name)
    with refused("torch.func", "functional_call", kind=UnsupportedError):
        torch.func.grad(loss)(dict(model.named_parameters()))
    with zerofx.unshard(model, writeback=False) as values:
        again = torch.func.grad(loss)(dict(values))
    close(again["first.weight"], got["first.weight"], "what the remedy gives")
    with refused("torch.func", kind=UnsupportedError):
        torch.vmap(lambda row: model.first(row).sum())(x)
    with refused("torch.func", kind=UnsupportedError):
        torch.func.grad(lambda row: F.tanh(model.first(row)).sum())(x)


def test_function_transforms() -> None:
    for stage in STAGES:
        run_ranks(2, _transforms, stage)


def _collectives(stage: int) -> None:
    """Of loops that average by hand: gradients, weights, and whether ranks agree."""
    model = net()
    compiled(model, stage)(*data(0)).backward()
    weight: Any = model.first.weight
    words = ("different rows", "leave the line out", "value.full_tensor()")
    with refused("allreduce_", *words, kind=UnsupportedError):
        dist.all_reduce(weight.grad)
    with refused("broadcast_", *words, kind=UnsupportedError):
        dist.broadcast(weight.data, 0)
    with refused("allgather_", *words, kind=UnsupportedError):
        dist.all_gather([torch.zeros_like(weight) for _ in range(2)], weight.detach())
    dist.broadcast(weight.full_tensor(), 0)


@pytest.mark.parametrize("stage", [0, 3])
def test_collectives_of_sharded_tensors(stage: int) -> None:
    run_ranks(2, _collectives, stage)
