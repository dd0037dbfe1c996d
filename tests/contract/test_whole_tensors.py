"""Functions of parameters that torch's `DTensor` has no rule for, and edits that it loses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import zerofx
from tests.contract.loops import close, compiled, config, data, full, net, same, sgd, train, twin
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "threshold": lambda w: torch.quantile(w.abs(), 0.4),
    "quantiles of columns": lambda w: torch.quantile(w, 0.4, dim=1, keepdim=True),
    "order": lambda w: w.abs().flatten().kthvalue(7).values,
    "largest": lambda w: (w * 2).view(-1).topk(5).values,
    "flat": lambda w: torch.flatten(w.abs()),
    "reshaped": lambda w: (w * 2).reshape(7, 13),
    "rows": lambda w: torch.stack([row.norm() for row in w * 2]),
    "unbound": lambda w: torch.stack(torch.unbind(w.abs())[2:]),
    "where": lambda w: (w > 0.1).nonzero(),
    "selected": lambda w: torch.masked_select(w, w > 0.1),
    "indexed": lambda w: w[w.abs() > 0.1],
    "distinct": lambda w: torch.unique((w * 10).round()),
    "counted": lambda w: torch.bincount((w.abs() * 10).long().flatten()),
    "histogram": lambda w: torch.histogram(w, 10)[0],
    "distances": lambda w: torch.cdist(w, w),
    "windows": lambda w: torch.Tensor.unfold(w * 1, 0, 2, 2).sum(-1),
    "clipped rows": lambda w: torch.renorm(w, 2, 0, 0.5),
    "least squares": lambda w: torch.linalg.lstsq(w, w).solution,
    "padded": lambda w: nn.functional.pad(w[None], (1, 1), mode="reflect"),
    "taken": lambda w: w.take(torch.tensor([3, 60])),
    "near": lambda w: torch.isclose(w, torch.zeros(13, 7, dtype=w.dtype), equal_nan=True),
    "product": lambda w: w.prod(0),
    "extremes so far": lambda w: w.cummax(0).values,
    "activation": lambda w: nn.functional.hardswish(w) + nn.functional.logsigmoid(w),
    "with plain rows": lambda w: w.index_add(0, torch.tensor([0, 12]), torch.ones(2, 7).to(w)),
    "one and two largest of rows": lambda w: w.topk(1).values + w.topk(2).values,
    "two histograms": lambda w: w.histc(3, -1, 1).sum() + w.histc(4, -1, 1)[3],
    "bits": lambda w: w.view(torch.int64)[:, 3] + w.view(torch.uint8)[:, 50],
    "quantiles without nan": lambda w: torch.nanquantile(w, 0.4, dim=1),
    "other shapes, in place": lambda w: (2 * w).unsqueeze_(0).transpose_(0, 2).squeeze_(2).t_(),
    "all near": lambda w: torch.tensor(torch.allclose(w, w)),
}
# torch has none, or gives the one of a number from a `DTensor` a wrong stride, and raises.
NO_GRADIENT = ("threshold", "distinct", "histogram", "least squares")


def _functions() -> None:
    model = net().double()
    plain = copy.deepcopy(model)
    zerofx.shard(model, config(3))
    ours, theirs = model.first.weight, plain.first.weight
    for name, function in FUNCTIONS.items():
        with torch.no_grad():
            close(full(function(ours)).double(), function(theirs).double(), name, 1e-12)
        want = function(theirs)
        if name in NO_GRADIENT or not want.requires_grad:
            continue
        ours.grad = theirs.grad = None
        scale = torch.arange(want.numel(), dtype=want.dtype).cos().view(want.shape)
        (want * scale).sum().backward()
        (function(ours) * scale).sum().backward()
        assert ours.grad.placements == ours.placements, name
        close(full(ours.grad), theirs.grad, f"gradient of {name}", 1e-12)


def test_functions_without_a_rule() -> None:
    run_ranks(4, _functions)


MADE: dict[str, Callable[[Any], Any]] = {
    "ones_like": torch.ones_like,
    "clone": lambda w: w.detach().clone(),
    "comparison": lambda w: w.abs() > 0.1,
    "cast comparison": lambda w: (w.detach() > 0).float(),
    "result": lambda w: w.detach() * 3,
    "gradient": lambda w: w.grad.clone(),
}
EDITS: dict[str, Callable[[Any], Any]] = {
    "row": lambda m: m[0].zero_(),
    "element": lambda m: m.__setitem__((3, 4), 1),
    "column": lambda m: m.__setitem__((slice(None), 1), 1),
    "rows by number": lambda m: m.__setitem__(torch.tensor([0, 2, 12]), 0),
    "mask": lambda m: m.__setitem__(m > 0.05, 0),
    "diagonal": lambda m: m.diagonal().fill_(1),
    "filled diagonal": lambda m: m.fill_diagonal_(1),
    "flat": lambda m: m.view(-1)[3:70].fill_(1),
    "transposed": lambda m: m.t()[2].zero_(),
    "each row": lambda m: [row.zero_() for row in m][:0],
    "narrow": lambda m: m.narrow(0, 5, 4).fill_(0),
    "data": lambda m: m.data[4].zero_(),
    "triangle": lambda m: m.tril_(),
    "plain mask": lambda m: m.masked_fill_(torch.arange(91).view(13, 7) % 2 == 0, 0),
    "scattered": lambda m: m.scatter_(1, torch.zeros(13, 1, dtype=torch.long), 1),
    "copied": lambda m: m.copy_(torch.arange(91).view(13, 7) % 2),
}


def _edited(weight: Any) -> Iterator[tuple[str, Tensor]]:
    for kind, make in MADE.items():
        for name, edit in EDITS.items():
            made = make(weight)
            edit(made)
            yield f"{kind}: {name}", made


SEVERAL: dict[str, Callable[..., Any]] = {
    "sorted": lambda w, out: torch.sort(w, 0, out=out),
    "sorted plain": lambda w, out: torch.sort(torch.arange(91.0).view(13, 7).flip(0), 0, out=out),
    "largest": lambda w, out: torch.topk(w, 13, 0, out=out),
}


def _written_together(weight: Any) -> Iterator[tuple[str, Tensor]]:
    for name, write in SEVERAL.items():
        for places in (torch.empty_like(weight, dtype=torch.long), torch.empty(13, 7).long()):
            values = torch.zeros_like(weight)
            with torch.no_grad():
                write(weight, (values, places))
            yield f"{name}: values", values
            yield f"{name}: places", places


def _masks() -> None:
    model = net()
    plain = copy.deepcopy(model)
    zerofx.shard(model, config(3))
    for weight in (model.first.weight, plain.first.weight):
        weight.grad = weight.detach() * 2
    pairs = zip(_edited(model.first.weight), _edited(plain.first.weight), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert torch.equal(full(ours), theirs), name
    both = map(_written_together, (model.first.weight, plain.first.weight))
    for (name, ours), (_, theirs) in zip(*both, strict=True):
        assert torch.equal(full(ours), theirs), name


def test_edits_of_what_is_computed() -> None:
    run_ranks(2, _masks)


REDUCED: dict[str, Callable[[Any], Any]] = {
    "norm": lambda w: w.norm(),
    "norm of magnitudes": lambda w: w.norm(1),
    "mean": lambda w: w.square().mean(),
    "largest": lambda w: w.max(),
    "product": lambda w: w.prod(),
    "sums of columns": lambda w: w.abs().sum(0),
    "norms of columns": lambda w: w.norm(dim=0),
    "product of matrices": lambda w: w.t() @ w,
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "clamp_": lambda m: m.clamp_(min=0.5),
    "sqrt_": lambda m: m.abs_().sqrt_(),
    "div_": lambda m: m.div_(3),
    "add": lambda m: m.__iadd__(1e-3),
    "power": lambda m: m.pow_(2).add_(m),
    "fill_": lambda m: m.fill_(3),
    "filled view": lambda m: m.view(-1)[0].fill_(2),
    "mask": lambda m: m.masked_fill_(m > 1, 0),
    "by number": lambda m: m.index_fill_(0, torch.tensor([0]), 9),
    "out": lambda m: torch.mul(m, m, out=m),
    "foreach": lambda m: torch._foreach_add_([m], 1.0),
    "foreach with a number": lambda m: torch._foreach_maximum_([m], 0.3),
    "copied": lambda m: m.copy_(torch.arange(m.numel()).view(m.shape)),
    "drawn": lambda m: m.uniform_(),
}


def _reduced() -> None:
    """Ranks have parts of what a reduction gives, and have parts of it after a write."""
    weight = net().double().first.weight.detach()
    model = net().double()
    zerofx.shard(model, config(3))
    for name, reduce in REDUCED.items():
        for kind, write in WRITES.items():
            with torch.no_grad():
                ours, theirs = reduce(model.first.weight), reduce(weight)
                for made in (ours, theirs):
                    torch.manual_seed(0)
                    write(made)
                close(full(ours), theirs, f"{name}: {kind}", 1e-12)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="negative numbers to a norm"):
        model.first.weight.norm().neg_()


def test_writes_to_what_ranks_reduce() -> None:
    run_ranks(2, _reduced)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda w: w + 0.1 * torch.randn_like(w),
    "integers": lambda w: torch.randint_like(w, 5),
    "dropout": lambda w: nn.functional.dropout(w, 0.5),
    "bernoulli": lambda w: torch.bernoulli(w.abs()),
    "exponential": lambda w: torch.empty_like(w).exponential_(),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, 0, 1, -0.3, 0.3),
    "orthogonal_": lambda w: nn.init.orthogonal_(w),
    "eye_": lambda w: nn.init.eye_(w),
}


def _draws() -> None:
    """Rank 0's numbers, whatever seeds the others have."""
    model = net()
    plain = copy.deepcopy(model)
    zerofx.shard(model, config(3))
    for name, draw in DRAWS.items():
        torch.manual_seed(0)
        want = draw(plain.first.weight).detach()
        torch.manual_seed(dist.get_rank())
        close(full(draw(model.first.weight)), want, name)


def test_draws_are_those_of_one_process() -> None:
    run_ranks(2, _draws)


def _pruned() -> None:
    model, ddp = net(), twin(net())
    run = compiled(model, 3)
    train(run, sgd(model), 1)
    train(ddp, sgd(ddp), 1)
    for trained in (model, ddp.module):
        prune.l1_unstructured(trained.first, "weight", amount=0.4)
        prune.ln_structured(trained.last, "weight", amount=0.4, n=2, dim=0)
    for trained, call in ((model, run), (ddp.module, DistributedDataParallel(ddp.module))):
        train(call, sgd(trained), [1, 2])
        prune.remove(trained.first, "weight")
        trained.zeros = (full(trained.first.weight) == 0).sum()
    assert model.zeros == ddp.module.zeros > 30
    same(model, ddp)


def test_pruned_after_sharding() -> None:
    run_ranks(2, _pruned)


def _printed() -> None:
    model = net()
    run = compiled(model, 3)
    run(*data(0)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert f"{norm:.3f}" == f"{norm.full_tensor().item():.3f}"
    assert f"{model.first.weight.norm():9.2e}" == f"{full(model.first.weight).norm():9.2e}"


def test_numbers_are_formatted() -> None:
    run_ranks(2, _printed)
