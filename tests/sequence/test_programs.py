"""What is in the programs, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.ranks import run_ranks
from tests.sequence.models import Gpt, batch
from tests.sequence.operations import REFUSED, WIDTH
from zerofx.errors import ConfigError, UnsupportedError, ZeroFxError
from zerofx.ir.edit import Editor
from zerofx.ir.program import Program
from zerofx.ir.spec import Region

_numels: list[int] = []


@dataclasses.dataclass(frozen=True)
class _Look(zerofx.Pass):
    """Remembers how large the values of programs are."""

    name: ClassVar[str] = "look"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD, Region.BACKWARD))

    def plan(self, program: Program) -> None:
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, Tensor):
                _numels.append(value.numel())

    def apply(self, edit: Editor, plan: None) -> None:
        pass


def _largest(size: int) -> int:
    _numels.clear()
    model = Gpt(rotary=True)
    options = {"inner": "eager", "sequence_parallel": size, "passes": [_Look()]}
    ids, labels = batch(0, length=16)
    zerofx.mark_sequence(ids)
    torch.compile(model, backend="zero0", options=options)(ids, labels)[0].backward()
    return max(_numels)


def test_the_largest_value_is_cut() -> None:
    whole, *_ = run_ranks(2, _largest, 1)
    assert run_ranks(2, _largest, 2) == [whole // 2] * 2


class _Net(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Embedding(9, 6)
        self.function = function

    def forward(self, ids: Tensor, other: Any = None) -> Any:
        return self.function(self.hidden(ids), other if other is not None else ids)


def _attend(h: Tensor, _: Tensor) -> Tensor:
    heads = h.view(2, -1, 3, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).sum()


def _shifted(h: Tensor, _: Tensor) -> Tensor:
    after = torch.zeros_like(h)
    after[:, 1:] = h[:, :-1]
    return after.sum()


def _breaks(h: Tensor, _: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return h.sum()


def _compiled(
    function: Callable[[Tensor, Tensor], Any], size: int = 2, stage: str = "0", **more: Any
) -> Any:
    torch.compiler.reset()
    options = {"inner": "eager", "sequence_parallel": size}
    return torch.compile(_Net(function), backend=f"zero{stage}", options=options, **more)


def _alone(ids: Tensor) -> Tensor:
    options = {"inner": "eager", "sequence_parallel": 2}
    return torch.compile(lambda x: x.sum(), backend="zero0", options=options)(ids)


def _ids(length: int = 8, first: int = 0) -> Tensor:
    ids = (first + torch.arange(2 * length).view(2, length)) % 9
    zerofx.mark_sequence(ids)
    return ids


CASES: dict[str, Callable[[], Any]] = {
    "no input of the compiled model is marked": lambda: _compiled(_attend)(_ids().clone()),
    "has 7 positions": lambda: _compiled(_attend)(_ids(7)),
    "has 2 positions": lambda: _compiled(_attend)(_ids(2)),
    "has 3 heads, which 2 ranks cannot share": lambda: _compiled(_attend)(_ids()),
    "breaks the forward into several graphs": lambda: _compiled(_breaks)(_ids()),
    "a part came back": lambda: _compiled(lambda h, x: x.sum() + h.sum())(
        _ids(), _compiled(lambda h, _: h)(_ids())
    ),
    "reads no parameters": lambda: _alone(_ids()),
    "were given different ones": lambda: _compiled(_attend)(_ids(first=dist.get_rank())),
    "an input asks for a gradient": lambda: _compiled(lambda h, x: (h * x).sum())(
        _ids(), torch.ones(6, requires_grad=True)
    ),
    "writes in place to what ranks hold in parts": lambda: _compiled(
        lambda h, ids: (h + ids.add_(1)[..., None]).sum()
    )(_ids()),
    "has as many elements as other values say": lambda: _compiled(
        lambda h, _: h[h[..., 0] > 0].sum(), fullgraph=True
    )(_ids()),
    "gives a value another shape in place": lambda: _compiled(
        lambda h, _: h.clone().transpose_(1, 2).sum()
    )(_ids(6)),
    "setitem writes in place": lambda: _compiled(_shifted)(_ids()),
    "draws random numbers for what each rank": lambda: _compiled(
        lambda h, _: F.alpha_dropout(h.mean(1), training=True).sum()
    )(_ids()),
    'does not go with backend="zero"': lambda: _compiled(_attend, stage="")(_ids()),
    "different models\n  - rank 0: detect_anomaly False, sequence_parallel 1": lambda: _compiled(
        lambda h, _: h.sum(), 1 + dist.get_rank()
    )(_ids()),
    "2 ranks cannot form groups of sequence_parallel=3": lambda: _compiled(_attend, 3)(_ids()),
}


def _said() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, case in CASES.items():
        try:
            case()
        except ZeroFxError as error:
            found[name] = str(error)
    return found


def test_refusals() -> None:
    for found in run_ranks(2, _said):
        for name in CASES:
            assert name in found.get(name, ""), name
            assert "Remedy" in found[name]


def _let_through() -> list[str]:
    found: list[str] = []
    weights, times = torch.ones(WIDTH, WIDTH), torch.ones(2, 8)
    for name, function in REFUSED.items():
        try:
            _compiled(lambda h, _, f=function: f(h[..., :WIDTH], weights, times).sum())(_ids())
            found.append(name)
        except UnsupportedError as error:
            assert "writes in place" in str(error), name
    return found


def test_writes_that_parts_would_lose_are_refused() -> None:
    assert run_ranks(2, _let_through) == [[], []]


def test_options() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel"):
        zerofx.ZeroConfig(sequence_parallel=0)
    with pytest.raises(ConfigError, match="no program returned"):
        zerofx.gather_sequence(torch.ones(2, 2))
    with pytest.raises(ConfigError, match="dim=2"):
        zerofx.mark_sequence(torch.ones(2, 2), dim=2)


def _draws(h: Tensor, _: Tensor) -> Tensor:
    h = h.mean(1)
    kept = torch.empty(2, 6)
    kept[1:].normal_()
    kept[:1].bernoulli_(0.5)
    return (F.dropout(h, training=True) * kept + torch.rand(6)).square().mean()


def _dropped() -> list[float]:
    """A loss of what every rank holds whole, with random numbers."""
    torch.manual_seed(dist.get_rank())
    run = _compiled(_draws)
    torch.manual_seed(dist.get_rank())
    losses = [run(_ids()) for _ in range(2)]
    losses[0].backward()
    return [loss.item() for loss in losses]


def test_ranks_of_a_sequence_draw_the_same_for_whole_values() -> None:
    one, other = run_ranks(2, _dropped)
    assert one == other
    assert one[0] != one[1]
