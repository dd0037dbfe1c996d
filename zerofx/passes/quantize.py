"""Which parameters travel as codes, and why the others do not."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from zerofx.ir.codes import note_sent
from zerofx.ir.edit import Editor
from zerofx.ir.facts import facts
from zerofx.ir.parcels import DTYPES, Codec
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class Exact:
    """A parameter that travels as it is.

    Attributes:
        param: its name.
        reason: why.
    """

    param: str
    reason: str


@dataclasses.dataclass(frozen=True)
class BucketCost:
    """What one bucket takes with numbers and with codes, in seconds.

    Attributes:
        collective: `unshard` or `reduce`.
        members: its parameters.
        exact: on the link, if numbers travel.
        coded: on the link, if codes do.
        kernels: in the kernels that make and read codes, which nothing hides.
        exposed: how long computation waits for the codes.
    """

    collective: str
    members: tuple[str, ...]
    exact: float
    coded: float
    kernels: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class Weighed:
    """Whether codes pay in a graph on one machine (`quantize="auto"`), in seconds.

    Attributes:
        pays: whether they are sent.
        exact: forward and backward, if numbers travel.
        coded: the same, if codes do; what else is quantized stays as it is.
        buckets: the buckets that would send codes.
    """

    pays: bool
    exact: float
    coded: float
    buckets: tuple[BucketCost, ...]

    @property
    def reason(self) -> str:
        """In words, for notes."""
        return f"auto: {1e3 * self.exact:.3g} ms, with codes {1e3 * self.coded:.3g} ms"

    @property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """For each bucket, by its parameters, what spoke for codes and against them."""
        did = "codes: they" if self.pays else "numbers: codes would"
        return tuple(
            (
                ", ".join(f"{each.collective}.{name}" for name in each.members),
                f"{did} save {1e3 * (each.exact - each.coded):.3g} ms of the link"
                f" and take {1e3 * each.kernels:.3g} ms of kernels; the graph takes "
                f"{1e3 * self.exact:.3g} ms with numbers, {1e3 * self.coded:.3g} ms with codes",
            )
            for each in self.buckets
        )


@dataclasses.dataclass(frozen=True)
class QuantizePlan:
    """What becomes of each parameter of the program.

    Attributes:
        quantized: collectives of one member each, which will send codes.
        codecs: names of their codecs.
        exact: the parameters of all others.
        weighed: the figures behind the decision, if there was one.
        reasons: by bucket, what they say.
    """

    quantized: tuple[fx.Node, ...]
    codecs: tuple[str, ...]
    exact: tuple[Exact, ...]
    weighed: Weighed | None = None
    reasons: tuple[tuple[str, str], ...] = ()


def plan_codes(
    program: Program,
    starts: Iterable[fx.Node],
    codecs: Sequence[Codec],
    patterns: Sequence[str],
    dtype_of: Callable[[fx.Node], torch.dtype],
    weighed: Weighed | None = None,
    *,
    reduces: bool = False,
) -> QuantizePlan:
    """Decide for each parameter.

    A parameter has the same answer in forward and backward: it depends on its specification, and
    on what was weighed for both.

    Args:
        program: the program.
        starts: its gathers, or its reductions.
        codecs: of the only hop, or of both.
        patterns: globs of what stays exact: names of parameters, or of their modules' classes.
        dtype_of: what a collective would send if it were exact.
        weighed: whether codes pay; by default they are wanted in any case.
        reduces: these are reductions.
    """
    reasons = {
        spec.name: why_exact(spec, codecs, patterns, reduces=reduces)
        for spec in sorted(program.params.values(), key=lambda spec: spec.index)
    }
    if weighed is not None and not weighed.pays:
        reasons = {name: reason or weighed.reason for name, reason in reasons.items()}
    quantized: list[fx.Node] = []
    for start in starts:
        name = facts(start).param
        if reasons.get(name) == "" and dtype_of(start) not in DTYPES:
            reasons[name] = f"{dtype_of(start)} has no codes"
        if reasons.get(name) == "":
            quantized.append(start)
    exact = tuple(Exact(name, reason) for name, reason in reasons.items() if reason)
    names = tuple(codec.name for codec in codecs)
    why = () if weighed is None else weighed.reasons
    return QuantizePlan(tuple(quantized), names, exact, weighed, why)


def send_codes(edit: Editor, plan: QuantizePlan, starts: Iterable[fx.Node], codecs: object) -> None:
    """Give each quantized start its codecs, and all other ones the reason why they have none."""
    reasons = {each.param: each.reason for each in plan.exact}
    chosen = set(plan.quantized)
    for start in starts:
        record = facts(start)
        if start not in chosen:
            edit.note(start, exact=reasons.get(record.param, ""))
            continue
        made = edit.call_before(start, start.target, (*start.args, codecs), record)
        edit.replace(start, made)
        note_sent(edit, made)


def why_exact(
    spec: ParamSpec, codecs: Sequence[Codec], patterns: Sequence[str], *, reduces: bool = False
) -> str:
    """Why a parameter, or its gradient, stays exact; empty if it does not."""
    if not spec.layout.sharded:
        return "replicated"
    if len(spec.shape) < 2:
        return "one dimension"
    names = spec.name, *spec.tied, *spec.owners
    if pattern := next((each for each in patterns if fits(each, names)), None):
        return f"as {pattern}"
    if spec.dtype not in DTYPES:
        return f"{spec.dtype} has no codes"
    chunk = spec.padded_numel // spec.layout.num_shards
    sent = spec.layout.reduce_dtype if reduces else None
    itemsize = min(each.itemsize for each in (spec.dtype, spec.full_dtype, sent or spec.dtype))
    for codec in codecs:
        if codec.parcel_bytes(-(-chunk // codec.block)) >= chunk * itemsize:
            return f"{chunk} numbers a rank"
    return ""


def fits(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern of `quantize_exact` is for a parameter with one of these names."""
    return any(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for name in names)
