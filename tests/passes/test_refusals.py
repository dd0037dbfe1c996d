"""A pass that fails, or breaks a rule, is named, and so is what it broke."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from tests.passes.cases import gathered, read_twice
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError, PassError, VerificationError
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts
from zerofx.ir.ops import FREE
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass, run_passes
from zerofx.passes.insert_frees import InsertFrees
from zerofx.passes.merge_unshards import MergeUnshards
from zerofx.passes.pipelines import pipeline


@dataclasses.dataclass(frozen=True)
class FreeEarly(Pass):
    """Moves every free to right after its gather."""

    name: ClassVar[str] = "free_early"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD,))

    def plan(self, program: Program) -> Any:
        return tuple(program.calls(FREE))

    def apply(self, edit: Editor, plan: Any) -> None:
        for free in plan:
            edit.move_after(free, free.args[0])


@dataclasses.dataclass(frozen=True)
class Crash(Pass):
    """Fails while it plans."""

    name: ClassVar[str] = "crash"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.JOINT,))

    def plan(self, program: Program) -> Any:
        raise KeyError("no such bucket")

    def apply(self, edit: Editor, plan: Any) -> None: ...


def test_pass_that_breaks_a_rule_is_named_with_parameter_node_and_remedy() -> None:
    with pytest.raises(VerificationError) as caught:
        run_passes(gathered(), [InsertFrees(), FreeEarly()])
    assert caught.value.rule == "free_follows_readers"
    for word in ("after pass free_early", "parameter w", "%0 reads full.w", "Remedy: move"):
        assert word in str(caught.value), word


def test_unverified_run_lets_it_pass() -> None:
    run_passes(gathered(), [InsertFrees(), FreeEarly()], check=False)


def test_pass_that_fails_is_named_with_those_that_ran() -> None:
    with pytest.raises(PassError, match="pass crash failed on the joint program") as caught:
        run_passes(read_twice(), [MergeUnshards(), Crash()])
    assert "ran before it: merge_unshards" in str(caught.value)
    assert "no such bucket" in str(caught.value)
    assert "disable it with" in caught.value.remedy


@dataclasses.dataclass(frozen=True)
class Refuse(Crash):
    """Has no use for the program, and says why."""

    def plan(self, program: Program) -> Any:
        raise PassError("a weight is read twice", "read it once", ["w"])


def test_pass_that_refuses_a_program_is_quoted() -> None:
    with pytest.raises(PassError) as caught:
        run_passes(read_twice(), [MergeUnshards(), Refuse()])
    error = caught.value
    assert error.problem == "pass crash refuses the joint program: a weight is read twice"
    assert error.remedy == "read it once"
    assert error.offenders == ("w", "ran before it: merge_unshards")


@dataclasses.dataclass(frozen=True)
class MustCrash(Crash):
    """As a pass without which a program would be wrong."""

    mandatory: ClassVar[bool] = True


def test_a_mandatory_pass_that_fails_cannot_be_disabled() -> None:
    with pytest.raises(PassError) as caught:
        run_passes(read_twice(), [MustCrash()])
    assert caught.value.remedy == f"repair MustCrash in {__name__}"


def test_passes_of_other_regions_are_skipped() -> None:
    seen: list[str] = []
    run_passes(
        gathered(), [Crash(), InsertFrees()], observer=lambda _, name, plan: seen.append(name)
    )
    assert seen == ["insert_frees"]


@dataclasses.dataclass(frozen=True)
class Edits(Pass):
    """Does something to a program that its rules or its callers do not allow."""

    edit: Callable[[Program, Editor], object]

    name: ClassVar[str] = "edits"
    regions: ClassVar[frozenset[Region]] = frozenset(Region)
    replaces: ClassVar[bool] = True

    def plan(self, program: Program) -> Any:
        return None

    def apply(self, edit: Editor, plan: Any) -> None:
        self.edit(edit.program, edit)


def _inputs(program: Program) -> list[fx.Node]:
    return program.graph.find_nodes(op="placeholder")


def _save_in_bf16(program: Program, edit: Editor) -> None:
    saved = program.outputs[0]
    args = (saved, torch.bfloat16)
    low = edit.call_before(
        program.output, torch.ops.prims.convert_element_type.default, args, Facts()
    )
    program.output.args = ((low, *program.outputs[1:]),)


def _add_input(program: Program, edit: Editor) -> None:
    with program.graph.inserting_after(_inputs(program)[-1]):
        program.graph.placeholder("more")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda p, e: e.move_before(_inputs(p)[1], _inputs(p)[0]),
            "input.0 is where input shard_w was",
        ),
        (_add_input, "input.1 is an input that nobody gives"),
        (
            lambda p, e: setattr(p.output, "args", ((*p.outputs, None),)),
            "returns 2 saved values or gradients instead of 1",
        ),
        (_save_in_bf16, r"returns saved value 0 as bfloat16\[2, 3\] instead of float64\[2, 3\]"),
    ],
)
def test_what_callers_give_and_take_stays(
    edit: Callable[[Program, Editor], object], words: str
) -> None:
    program = dataclasses.replace(gathered(), num_user_outputs=0)
    with pytest.raises(VerificationError, match=words) as caught:
        run_passes(program, [InsertFrees(), Edits(edit)])
    assert caught.value.rule == "same_border"


def test_a_pass_that_leaves_no_graph_is_named() -> None:
    with pytest.raises(PassError, match="pass edits failed on the forward program"):
        run_passes(gathered(), [Edits(lambda p, e: p.graph.erase_node(p.output))])


def test_unknown_pass_cannot_be_disabled() -> None:
    with pytest.raises(ConfigError, match="insert_freez"):
        pipeline(ZeroConfig(disable=("insert_freez",)))


def test_option_passes_holds_passes() -> None:
    with pytest.raises(ConfigError, match="passes"):
        pipeline(ZeroConfig(passes=("insert_frees",)))
    assert pipeline(ZeroConfig(passes=(FreeEarly(),)))[-1] == FreeEarly()
