"""What users change in a pipeline: passes are put before, after or in place of named ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast, get_args

from zerofx.errors import ConfigError, nearest
from zerofx.ir.spec import Region
from zerofx.passes.base import Numerics, Pass

Where = Literal["before", "after", "replace", "without", "end"]


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a pipeline, made by `before`, `after`, `replace` or `without`.

    Attributes:
        where: what happens at the place of the named pass.
        name: of that pass; empty for `end`.
        new: the pass that comes in; `None` for `without`.
        source: who asked for it, if not the options of this compilation.
    """

    where: Where
    name: str
    new: Pass | None = None
    source: str = ""

    def __str__(self) -> str:
        new = self.new.name if self.new is not None else ""
        what = " ".join(filter(None, (new, "" if self.where == "end" else self.where, self.name)))
        return f"{what} ({self.source})" if self.source else what


def before(name: str, new: Pass) -> Change:
    """Run `new` right before the pass called `name`.

    Raises:
        ConfigError: `new` is no pass, or `name` no text.
    """
    return Change("before", _named(name), check_pass(new))


def after(name: str, new: Pass) -> Change:
    """Run `new` right after the pass called `name`.

    Raises:
        ConfigError: `new` is no pass, or `name` no text.
    """
    return Change("after", _named(name), check_pass(new))


def replace(name: str, new: Pass) -> Change:
    """Run `new` instead of the pass called `name`.

    In place of a mandatory pass only a mandatory pass of at least the same regions is taken.

    Raises:
        ConfigError: `new` is no pass, or `name` no text.
    """
    return Change("replace", _named(name), check_pass(new))


def without(name: str) -> Change:
    """Leave the pass called `name` out, as the option `disable` does.

    Raises:
        ConfigError: `name` is no text.
    """
    return Change("without", _named(name))


def as_change(thing: Any, source: str = "") -> Change:
    """A change, from a change or from a pass, which goes to the end.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(thing, Change):
        return dataclasses.replace(thing, source=source) if source else thing
    return Change("end", "", check_pass(thing, source or "option passes"), source)


def check_pass(thing: Any, source: str = "") -> Pass:
    """`thing` itself, if it can be run and compared between ranks.

    Raises:
        ConfigError: it is no pass, or one without name, regions, numerics or options that compare.
    """
    by = f"{source}: " if source else ""
    if isinstance(thing, type) and issubclass(thing, Pass):
        raise ConfigError(
            f"{by}{thing.__name__} is a class, not a pass", f"write {thing.__name__}()"
        )
    if not isinstance(thing, Pass):
        raise ConfigError(
            f"{by}{thing!r} is no pass", "give an instance of a subclass of zerofx.Pass"
        )
    kind = type(thing)
    # Otherwise two instances with different options would be equal, and share compiled programs.
    if "__dataclass_fields__" not in vars(kind):
        raise ConfigError(
            f"{by}{kind.__name__} is no dataclass of its own",
            "put @dataclasses.dataclass(frozen=True) before the class; its fields are its options",
        )
    name, regions = getattr(kind, "name", None), getattr(kind, "regions", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"{by}{kind.__name__} has no name", 'give it one: name: ClassVar[str] = "own_pass"'
        )
    if not _are_regions(regions):
        raise ConfigError(
            f"{by}pass {name} has regions={regions!r}",
            "name the programs it works on: frozenset((Region.FORWARD, Region.BACKWARD))",
        )
    for flag in ("mandatory", "replaces"):
        if not isinstance(getattr(thing, flag), bool):
            raise ConfigError(
                f"{by}pass {name} has {flag}={getattr(thing, flag)!r}", "write True or False"
            )
    if thing.numerics not in get_args(Numerics):
        raise ConfigError(
            f"{by}pass {name} has numerics={thing.numerics!r}",
            f"say what it does to numbers: {', '.join(get_args(Numerics))}",
        )
    return thing


def change_pipeline(listed: Sequence[Pass], changes: Iterable[Change]) -> tuple[Pass, ...]:
    """Apply changes one after the other; a later one may refer to what an earlier one put in.

    Raises:
        ConfigError: a change refers to no pass of the list, brings in a name that is taken, or
            replaces a mandatory pass by one that does less.
    """
    out = list(listed)
    for each in changes:
        place = len(out) if each.where == "end" else _place(out, each)
        stop = place + 1 if each.where in ("replace", "without") else place
        new = [] if each.new is None else [each.new]
        if each.where == "after":
            place = stop = place + 1
        elif each.where == "replace" and each.new is not None:
            _refuse_less(out[place], each.new, each)
        rest = out[:place] + out[stop:]
        for one in new:
            if any(one.name == other.name for other in rest):
                raise ConfigError(
                    f"two passes are called {one.name}: {each} adds the second",
                    f'replace the first: zerofx.replace("{one.name}", …), or rename the second',
                )
        out[place:stop] = new
    return tuple(out)


def _named(name: Any) -> str:
    if isinstance(name, str):
        return name
    raise ConfigError(
        f"{name!r} is no name of a pass", 'name the pass as the pipeline does: "schedule"'
    )


def _place(listed: Sequence[Pass], change: Change) -> int:
    names = [each.name for each in listed]
    if change.name in names:
        return names.index(change.name)
    raise unknown_pass(change.name, names, str(change))


def unknown_pass(name: str, names: Sequence[str], what: str) -> ConfigError:
    """The error for a name that no pass of a list bears; it names the nearest."""
    hint = nearest(str(name), names)
    return ConfigError(
        f"no pass is called {name!r}: {what}", f"{hint}the passes are: {', '.join(names)}"
    )


def _refuse_less(old: Pass, new: Pass, change: Change) -> None:
    if not old.mandatory:
        return
    if not new.mandatory:
        raise ConfigError(
            f"{old.name} is mandatory, and {new.name} is not: {change}",
            f"let {type(new).__name__} do all that {old.name} does, and say so: "
            "mandatory: ClassVar[bool] = True",
        )
    missing = sorted(region.value for region in old.regions - new.regions)
    if missing:
        raise ConfigError(
            f"{old.name} is mandatory for {', '.join(missing)} programs, which {new.name} leaves "
            f"out: {change}",
            f"add them to the regions of {type(new).__name__}",
        )


def _are_regions(regions: Any) -> bool:
    if not isinstance(regions, frozenset) or not regions:
        return False
    return all(isinstance(each, Region) for each in cast("frozenset[Any]", regions))
