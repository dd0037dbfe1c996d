"""A pass that fails, or breaks a rule, is named, and so is what it broke."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from tests.passes.cases import gathered, read_twice
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError, PassError, VerificationError
from zerofx.ir.edit import Editor
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


def test_unknown_pass_cannot_be_disabled() -> None:
    with pytest.raises(ConfigError, match="insert_freez"):
        pipeline(ZeroConfig(disable=("insert_freez",)), 1)


def test_option_passes_holds_passes() -> None:
    with pytest.raises(ConfigError, match="passes"):
        pipeline(ZeroConfig(passes=("insert_frees",)), 1)
    assert pipeline(ZeroConfig(passes=(FreeEarly(),)), 1)[-1] == FreeEarly()
