"""`--why` of nodes and passes with names of all kinds, and of names that the screen shows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

import zerofx
from zerofx.debug.explanation import Explanation
from zerofx.errors import ConfigError
from zerofx.passes import Editor, Pass, Program, Region, ops

NAMES = (
    "größe",
    "en-de",
    "a b",
    "x:y",
    "p[0]",
    "日本",
    "a_name_of_a_module_that_is_long",
)


class Named(nn.Module):
    """Layers by names that people give."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict(
            {name: nn.Linear(64, 64, bias=False) for name in ("first", *NAMES)}
        )

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts.values():
            x = expert(x).relu()
        return x.sum()


@dataclasses.dataclass(frozen=True)
class Reasoned:
    reasons: tuple[tuple[fx.Node, str], ...]


@dataclasses.dataclass(frozen=True)
class Declines(Pass):
    """Does nothing, for a reason."""

    name: ClassVar[str] = "declines"
    regions: ClassVar[frozenset[Region]] = frozenset({Region.FORWARD})

    def plan(self, program: Program) -> Reasoned:
        return Reasoned(tuple((start, "too small") for start in program.calls(ops.UNSHARD_START)))

    def apply(self, edit: Editor, plan: Any) -> None:
        pass


@pytest.fixture(scope="module")
def found() -> Explanation:
    options: Any = {"inner": "eager", "bucket_bytes": 0, "prefetch_bytes": 0, "min_shard_numel": 0}
    config = zerofx.ZeroConfig(**options, dump="", passes=(Declines(),))
    return zerofx.explain(Named(), torch.zeros(4, 64), config=config, world_size=4)


@pytest.mark.parametrize("name", NAMES)
def test_nodes_of_modules_with_any_name(name: str, found: Explanation) -> None:
    node = f"unshard.experts.{name}.weight"
    forward = found.why(node)[0]
    assert forward.region == "forward" and forward.line.startswith(f"{node} = ")
    assert {"keep_unsharded", "declines"} <= {each.by for each in forward.decisions}
    assert found.why(f"forward:{node}") == [forward]
    (free, *_) = found.why(f"full.experts.{name}.weight")
    assert free.line.startswith(f"full.experts.{name}.weight: ")


def test_reasons_of_other_passes_are_not_about_starts(found: Explanation) -> None:
    (said,) = {
        each.text
        for each in found.why("unshard.experts.en-de.weight")[0].decisions
        if each.by == "declines"
    }
    assert said == "too small"


def test_a_name_is_suggested_once(found: Explanation) -> None:
    with pytest.raises(ConfigError) as refused:
        found.why("unshard.experts.en_de.weight")
    assert refused.value.remedy.count("'unshard.experts.en-de.weight'") == 1


def test_names_on_the_screen_can_be_asked_for(found: Explanation) -> None:
    table = str(found).partition("collective ")[2].partition("\n\n")[0]
    shown = [line.partition("  ")[0] for line in table.splitlines()[1:] if "ward " in line]
    assert shown
    for name in shown:
        assert found.why(name)
