"""One training loop under every kind of data parallelism, so that results can be compared.

    want = run_ranks(2, train, "gpt", "ddp", optimizer="adamw", clip=1.0)
    got = run_ranks(2, train, "gpt", "zero3", optimizer="adamw", clip=1.0)
    assert_same(got, want, rtol=1e-6)                   # rtol=0: bitwise

`train` runs inside the ranks of `tests.ranks`. How it trains: "ddp", "fully_shard", "single" (one
process that averages the ranks' losses, without communication), or "zero0" … "zero3".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.models import ZOO, Batch, batch, make

ZERO = ("zero0", "zero1", "zero2", "zero3")
HOWS = ("ddp", "fully_shard", "single", *ZERO)

COMPARED = ("losses", "norms", "params")
OptimizerSpec = str | tuple[str, Mapping[str, Any]]
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    # The usual eps of 1e-8 turns the rounding noise of a zero gradient into whole steps.
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}),
}


class Result(TypedDict):
    """What one rank saw; `params`, `grads` (of the last step) and `buffers` are full values."""

    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def train(
    name: str,
    how: str,
    *,
    steps: int = 5,
    optimizer: OptimizerSpec = "sgd",
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
    rows: int | Sequence[int] = 4,
    optimizer_first: bool = True,
    rank_seeds: bool = False,
    micro_batches: int = 1,
    world_size: int | None = None,
    precision: Mapping[str, Any] | None = None,
) -> Result:
    """Trains model `name` of the zoo and returns what this rank saw.

    Args:
        name: key of `tests.models.ZOO`.
        how: one of `HOWS`.
        steps: number of optimizer steps.
        optimizer: key of `OPTIMIZERS`, or `(key, overrides)`.
        clip: maximum norm for `clip_grad_norm_`; norms are recorded in any case.
        dtype: of the model and its floating inputs.
        options: for zeroN, the options given to `torch.compile`. Parameters of the zoo are tiny,
            so `min_shard_numel` is 0 unless given: all are sharded.
        rows: of each rank's batch, one number or one per rank.
        optimizer_first: for zeroN, build the optimizer on the plain parameters, before compiling.
        rank_seeds: give each rank its own initial weights; rank 0's must win.
        micro_batches: backward passes per step; each step's loss is the last one's.
        world_size: for "single", how many ranks to stand for; by default those of the group.
        precision: for "fully_shard" and zeroN, fields of `MixedPrecisionPolicy`.
    """
    if how not in HOWS:
        raise ValueError(f"how={how!r} is not one of {', '.join(HOWS)}")
    rank, world_size = dist.get_rank(), world_size or dist.get_world_size()
    ranks = range(world_size) if how == "single" else [rank]
    sizes = [rows] * world_size if isinstance(rows, int) else list(rows)
    model = make(name, dtype, seed=rank if rank_seeds and how != "single" else 0)
    chosen = {**(options or {}), **(precision or {})} if how in ZERO else dict(precision or {})
    run, opt = _prepare(name, how, model, optimizer, chosen, optimizer_first)

    def inputs(number: int) -> dict[int, Batch]:
        return {r: batch(name, r, number, dtype, rows=sizes[r]) for r in ranks}

    return fit(model, run, opt, inputs, steps=steps, clip=clip, micro_batches=micro_batches)


def fit(
    model: nn.Module,
    run: Callable[..., Tensor],
    opt: Optimizer,
    inputs: Callable[[int], Mapping[int, Batch]],
    *,
    steps: int = 5,
    clip: float | None = None,
    micro_batches: int = 1,
) -> Result:
    """The loop of `train`, for a model that is ready.

    Args:
        model: owns the parameters.
        run: called with a batch, returns the loss.
        opt: its optimizer.
        inputs: for the number of a backward pass, the batch of each rank that this process plays.
        steps: number of optimizer steps.
        clip: as for `train`.
        micro_batches: as for `train`.
    """
    result = Result(losses=[], norms=[], params={}, grads={}, buffers={})
    loss = 0.0
    for step in range(steps):
        for micro in range(micro_batches):
            number = step * micro_batches + micro
            loss = _forward_and_backward(run, inputs(number), number)
        result["losses"].append(loss)
        result["norms"].append(_norm(model, clip))
        if step == steps - 1:
            result["grads"] = {key: _full(p.grad) for key, p in model.named_parameters()}
        opt.step()
        opt.zero_grad()
    result["params"] = {key: _full(p) for key, p in model.named_parameters()}
    result["buffers"] = {key: b.detach().clone() for key, b in model.named_buffers()}
    return result


def build_optimizer(spec: OptimizerSpec, params: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer of a spec, over every parameter given, frozen ones too."""
    key, overrides = (spec, {}) if isinstance(spec, str) else spec
    build, defaults = OPTIMIZERS[key]
    return build(params, **{**defaults, **overrides})


def assert_same(
    got: Sequence[Result],
    want: Sequence[Result],
    *,
    rtol: float,
    params_rtol: float | None = None,
    keys: Sequence[str] = COMPARED,
) -> None:
    """Compares two runs: mean losses, then the other `keys` on every rank; 0 means bitwise.

    A tensor's error is relative to its largest entry, because entries near zero are sums of large
    terms; `params_rtol` replaces `rtol` for params and grads. All ranks must agree bitwise on all
    but losses and buffers. "grads" is for bitwise runs and for which ones are None: where a
    gradient is zero in exact arithmetic (a bias before BatchNorm), rounding is all there is.
    """
    errors = difference(got, want, keys)
    tensors = rtol if params_rtol is None else params_rtol
    bad = [
        f"{key}: {error:.2e} > {limit:.0e}"
        for key, error in errors.items()
        if not error <= (limit := rtol if key in ("losses", "norms") else tensors)
    ]
    assert not bad, "\n".join(bad)


def difference(
    got: Sequence[Result],
    want: Sequence[Result],
    keys: Sequence[str] = COMPARED,
) -> dict[str, float]:
    """The largest error of each thing compared, by name ("losses", "params.head.weight", …)."""
    errors = {}
    for key in keys:
        if key == "losses":
            errors[key] = _error(_mean_losses(got), _mean_losses(want))
            continue
        for rank, result in enumerate(got):
            one, other = _named(result, key), _named(want[rank % len(want)], key)
            assert one.keys() == other.keys(), f"rank {rank}: {one.keys() ^ other.keys()}"
            for name, value in one.items():
                error = _error(value, other[name])
                if key != "buffers" and _error(value, _named(got[0], key)[name]) > 0:
                    error = float("inf")
                errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _prepare(
    name: str,
    how: str,
    model: nn.Module,
    optimizer: OptimizerSpec,
    options: dict[str, Any],
    optimizer_first: bool,
) -> tuple[Callable[..., Tensor], Optimizer]:
    entry = ZOO[name]
    if how == "single":
        return model, build_optimizer(optimizer, model.parameters())
    if how == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=entry.unused)
        return wrapped, build_optimizer(optimizer, model.parameters())
    if how == "fully_shard":
        # FSDP2 leaves initial values to the user; DDP and zerofx broadcast rank 0's.
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        # Its weights would be bf16 and its statistics not, which is an error of torch.
        norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
        for norm in norms if "param_dtype" in options else []:
            policy = MixedPrecisionPolicy(reduce_dtype=options.get("reduce_dtype"))
            fully_shard(norm, mp_policy=policy)
        # The default of zerofx, and of FSDP2 before torch 2.15: what gradients are computed in.
        options.setdefault("reduce_dtype", options.get("param_dtype"))
        for module in (*map(model.get_submodule, entry.fsdp_blocks), model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(**options))
        return model, build_optimizer(optimizer, model.parameters())
    options.setdefault("min_shard_numel", 0)
    early = build_optimizer(optimizer, model.parameters()) if optimizer_first else None
    if entry.explicit or "param_dtype" in options:
        import zerofx  # the one line needs no import, and only these models need more

        zerofx.shard(model, zerofx.ZeroConfig(stage=int(how[-1]), **options))
    compiled = torch.compile(model, backend=how, options=options)
    return compiled, early or build_optimizer(optimizer, model.parameters())


def _forward_and_backward(
    run: Callable[..., Tensor], batches: Mapping[int, Batch], number: int
) -> float:
    """One backward per batch, of its share of the mean; rank 0's buffers win, as in DDP."""
    buffers = list(run.buffers()) if isinstance(run, nn.Module) and len(batches) > 1 else []
    before = [buffer.clone() for buffer in buffers]
    after = before
    total = 0.0
    for rank, inputs in batches.items():
        torch.manual_seed(1000 * number + rank)
        loss = run(*inputs)
        (loss / len(batches)).backward()
        total += loss.item() / len(batches)
        if rank == 0:
            after = [buffer.clone() for buffer in buffers]
        _restore(buffers, before)
    _restore(buffers, after)
    return total


def _restore(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def _norm(model: nn.Module, clip: float | None) -> float:
    params = [p for p in model.parameters() if p.grad is not None]
    if clip is None:
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    else:
        norm = nn.utils.clip_grad_norm_(params, clip)
    return float(_full(norm))


def _full(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach()
    # A replicated DTensor returns its own memory.
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _mean_losses(results: Sequence[Result]) -> Tensor:
    losses = torch.tensor([result["losses"] for result in results], dtype=torch.float64)
    return losses.mean(0)


def _named(result: Result, key: str) -> dict[str, Any]:
    value: Any = result[key]
    if isinstance(value, dict):
        return {f"{key}.{name}": tensor for name, tensor in value.items()}
    return {key: torch.tensor(value, dtype=torch.float64)}


def _error(one: Tensor | None, other: Tensor | None) -> float:
    """0 when equal bit for bit; infinite when shape, dtype, presence or finiteness differ."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    error = (one.double() - other.double()).abs().max() / other.double().abs().max()
    return error.item() if error.isfinite() else float("inf")
