"""Pipelines are changed by the names of passes; what cannot be done is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

import zerofx
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError
from zerofx.passes.base import Pass
from zerofx.passes.fingerprint import fingerprint
from zerofx.passes.insert_frees import InsertFrees
from zerofx.passes.pipelines import pipeline
from zerofx.passes.registry import registered, with_registered
from zerofx.passes.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Idle(Pass):
    """Does nothing."""

    level: int = 0

    name: ClassVar[str] = "idle"
    regions: ClassVar[Any] = InsertFrees.regions

    def plan(self, program: Any) -> tuple[()]:
        return ()

    def apply(self, edit: Any, plan: tuple[()]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Other(Idle):
    """Has another name."""

    name: ClassVar[str] = "other"


@dataclasses.dataclass(frozen=True)
class MustFree(Idle):
    """Says that it frees."""

    name: ClassVar[str] = "must_free"
    mandatory: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class MustFreeForward(MustFree):
    """Says so for one region."""

    name: ClassVar[str] = "must_free_forward"
    regions: ClassVar[Any] = frozenset(list(InsertFrees.regions)[:1])


class Careless(Idle):
    """Options outside of fields: two of them compare equal."""

    def __init__(self, secret: int) -> None:
        super().__init__()
        object.__setattr__(self, "secret", secret)


@dataclasses.dataclass(frozen=True)
class Perhaps(Idle):
    """Would switch a rule off by a word."""

    replaces: ClassVar[Any] = "no"


@dataclasses.dataclass(frozen=True)
class Nameless(Idle):
    """Its name is no word."""

    name: ClassVar[str] = "no name"


@dataclasses.dataclass(frozen=True)
class Fuzzy(Idle):
    """Says about numbers what nobody knows."""

    numerics: ClassVar[Any] = "fuzzy"


@dataclasses.dataclass(frozen=True)
class Nowhere(Idle):
    """Works on nothing."""

    regions: ClassVar[Any] = frozenset()


def names(*passes: Any, **options: Any) -> list[str]:
    return [each.name for each in pipeline(ZeroConfig(passes=passes, **options))]


USUAL = names()


def test_a_pass_goes_to_the_end() -> None:
    assert names(Idle()) == [*USUAL, "idle"]


def test_before_after_replace_without() -> None:
    place = USUAL.index("schedule")
    assert names(zerofx.before("schedule", Idle())) == [*USUAL[:place], "idle", *USUAL[place:]]
    after = place + 1
    assert names(zerofx.after("schedule", Idle())) == [*USUAL[:after], "idle", *USUAL[after:]]
    assert names(zerofx.replace("schedule", Idle())) == [*USUAL[:place], "idle", *USUAL[after:]]
    assert names(zerofx.without("schedule")) == [*USUAL[:place], *USUAL[after:]]
    assert names(disable=("schedule",)) == names(zerofx.without("schedule"))


def test_a_pass_may_take_the_place_of_its_namesake() -> None:
    made = pipeline(ZeroConfig(passes=(zerofx.replace("schedule", Schedule(77)),)))
    assert [each.name for each in made] == USUAL and Schedule(77) in made


def test_later_changes_see_earlier_ones() -> None:
    changed = names(Idle(), zerofx.before("idle", Other()))
    assert changed == [*USUAL, "other", "idle"]
    assert names(Idle(), zerofx.before("idle", Other()), disable=("idle",)) == [*USUAL, "other"]


def test_mandatory_passes_are_replaced_by_mandatory_ones() -> None:
    assert "must_free" in names(zerofx.replace("insert_frees", MustFree()))
    with pytest.raises(ConfigError, match="insert_frees is mandatory, and idle is not"):
        names(zerofx.replace("insert_frees", Idle()))
    with pytest.raises(ConfigError, match=r"mandatory for .* programs, which must_free_forward"):
        names(zerofx.replace("insert_frees", MustFreeForward()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: zerofx.before("shedule", Idle()), ("'shedule'", "did you mean 'schedule'?")),
        (lambda: zerofx.without("idle"), ("no pass is called 'idle'", "the passes are: merge_uns")),
        (lambda: zerofx.after("schedule", Idle), ("Idle is a class", "write Idle()")),
        (lambda: zerofx.replace("schedule", 3), ("3 is no pass", "zerofx.Pass")),  # type: ignore
        (lambda: "schedule", ("'schedule' is no pass",)),
        (lambda: Careless(1), ("no dataclass of its own", "frozen=True")),
        (lambda: Perhaps(), ("pass idle has replaces='no'", "True or False")),
        (lambda: Nameless(), ("Nameless has no name",)),
        (lambda: Nowhere(), ("idle has regions=", "Region.FORWARD")),
        (lambda: Fuzzy(), ("pass idle has numerics='fuzzy'", "exact, reordered, lossy")),
        (lambda: zerofx.without(3), ("3 is no name of a pass", '"schedule"')),  # type: ignore
        (lambda: zerofx.before("schedule", Schedule(1)), ("two passes are called schedule",)),
    ],
)
def test_refusals(change: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        names(change())
    for word in words:
        assert word in str(refused.value)


def test_registered_passes_hold_for_every_configuration_until_they_are_taken_back() -> None:
    with zerofx.register_pass(zerofx.before("schedule", Idle())) as first:
        second = zerofx.register_pass(Other())
        config = with_registered(ZeroConfig(passes=(zerofx.without("idle"),)))
        assert [each.name for each in pipeline(config)] == [*USUAL, "other"]
        assert with_registered(config) == config, "they are put in once"
        with pytest.raises(ConfigError, match=r"other \(zerofx.register_pass\) is registered"):
            zerofx.register_pass(Other())
        second.unregister()
        first.unregister()
        assert with_registered(config).passes == (zerofx.without("idle"),)
    assert registered() == ()


def test_register_pass_refuses_what_is_no_pass() -> None:
    with pytest.raises(ConfigError, match="is no pass"):
        zerofx.register_pass("schedule")  # type: ignore[arg-type]
    assert registered() == ()


def test_a_name_taken_by_a_registered_pass_says_by_whom() -> None:
    with zerofx.register_pass(Idle()), pytest.raises(ConfigError, match="two passes are called"):
        pipeline(with_registered(ZeroConfig(passes=(Idle(1),))))


def test_fingerprints_tell_options_order_and_code_apart() -> None:
    usual = fingerprint(pipeline(ZeroConfig()))
    assert fingerprint(pipeline(ZeroConfig())) == usual
    assert fingerprint(pipeline(ZeroConfig(bucket_bytes=7))) != usual
    idle, other = fingerprint([Idle()]), fingerprint([Idle(1)])
    assert idle[0] == other[0] and "Idle(level=0), code " in idle[1] and idle != other
    assert fingerprint([Idle(), Other()]) != fingerprint([Other(), Idle()])
    one, two = (_redefined(body) for body in ("return (1, lambda: 2)", "return (1, lambda: 3)"))
    assert fingerprint([one]) != fingerprint([two]), "the same name and options, other code"


@dataclasses.dataclass(frozen=True)
class Chosen(Idle):
    """Has options without an order, and a place for what it finds."""

    sizes: frozenset[int] = frozenset()
    found: object = dataclasses.field(default_factory=object, compare=False)

    name: ClassVar[str] = "chosen"


def test_fingerprints_are_those_of_options_alone() -> None:
    # The two sets have other orders, as sets of texts have in other processes.
    one, two = (Chosen(sizes=frozenset(each)) for each in ([0, 8], [8, 0]))
    assert fingerprint([one]) == fingerprint([two]) != fingerprint([Chosen()])


def _redefined(body: str) -> Pass:
    """A pass whose text is nowhere on disk."""
    names: dict[str, Any] = {"Idle": Idle, "dataclass": dataclasses.dataclass}
    exec(
        "@dataclass(frozen=True)\nclass Typed(Idle):\n"
        f"    def plan(self, program):\n        {body}\n",
        {**names, "__name__": "a_prompt"},
        names,
    )
    made: Pass = names["Typed"]()
    return made
