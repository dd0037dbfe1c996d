"""What codes mean: how far from the numbers they are, and what stays visible."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from tests.codegen.strategies import (
    ALL_CODECS,
    outputs_for,
    values_for,
    wires_for,
)
from tests.program_builder import layout_of, specs_of
from zerofx.codegen.reference import Reference
from zerofx.errors import KernelError
from zerofx.ir.kernels import KernelSpec, Pack, Repack, Unpack, reduce_kernels
from zerofx.ir.parcels import DTYPES, Codec, Member, Parcels
from zerofx.sim.quantized import reduce_quantized

named = pytest.mark.parametrize("codec", ALL_CODECS, ids=lambda codec: codec.name)


def run(
    spec: KernelSpec, inputs: list[Tensor], seed: int = 0, compiled: bool = False
) -> list[Tensor]:
    outputs = outputs_for(spec, seed, 85 if compiled else 255)
    Reference(spec, compiled)(inputs, outputs, seed)
    return outputs


def round_trip(x: Tensor, codec: Codec, seed: int = 0, compiled: bool = False) -> Tensor:
    parcels = Parcels((Member("x", x.numel(), x.numel(), x.dtype),), codec, 1)
    (wire,) = run(Pack(parcels), [x], seed, compiled)
    (back,) = run(Unpack(parcels), [wire[None]], 0, compiled)
    return back


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(("codec", "near"), [(Codec("int8"), 0.008), (Codec("int4"), 0.13)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_one_pass_is_as_expected(codec: Codec, near: float, dtype: torch.dtype) -> None:
    x = gaussian(1 << 18).to(dtype)
    assert near * 2 / 3 < error(round_trip(x, codec), x) < near * 4 / 3


@pytest.mark.parametrize(("nodes", "world"), [(2, 4), (4, 16)])
def test_error_of_two_hops_is_as_expected(nodes: int, world: int) -> None:
    params = list(specs_of({"w": (1024, 64)}, layout_of(world), dtype=torch.float32).values())
    grads = [[gaussian(1 << 16, rank)] for rank in range(world)]
    kernels = reduce_kernels(params, Codec("int4"), Codec("int4"), nodes)
    found = torch.cat([one[0] for one in reduce_quantized(kernels, grads)])
    wanted = torch.stack([grad for (grad,) in grads]).mean(0)
    assert 0.16 * 2 / 3 < error(found, wanted) < 0.16 * 4 / 3


@named
def test_no_element_is_off_by_more_than_a_step(codec: Codec) -> None:
    x = gaussian(codec.block * 100).view(-1, codec.block) * torch.logspace(-30, 30, 100)[:, None]
    back = round_trip(x.view(-1), codec, 3).view_as(x)
    off, largest = (back - x).abs().amax(-1), x.abs().amax(-1)
    if codec.code == "fp8":
        assert (off <= largest * 2**-4).all()
        return
    reach = largest if codec.symmetric else x.amax(-1) - x.amin(-1)
    steps = 2 ** (codec.bits - 1) - 1 if codec.symmetric else 2**codec.bits - 1
    half = 1.0 if codec.rounding == "stochastic" else 0.5
    assert (off <= reach / steps * half * 1.001).all()


@named
def test_a_block_that_is_not_finite_stays_visible(codec: Codec) -> None:
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = gaussian(codec.block * 4)
        x[codec.block + 3] = bad
        back = round_trip(x, codec).view(4, -1)
        assert back[1].isnan().all() and back[[0, 2, 3]].isfinite().all()


@named
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_finite_stays_finite(codec: Codec, dtype: torch.dtype) -> None:
    for largest in (torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.finfo(dtype).eps):
        if dtype is torch.float64 and largest != torch.finfo(dtype).eps:
            continue  # beyond fp32
        x = torch.full((codec.block,), largest, dtype=dtype) * torch.linspace(
            1, 0, codec.block, dtype=dtype
        )
        back = round_trip(x, codec)
        assert back.isfinite().all() and (back.abs() <= largest * (1 + 2**-7)).all()


def test_fp64_beyond_fp32_and_too_wide_a_range_are_not_clipped() -> None:
    assert (
        round_trip(torch.full((64,), 1e300, dtype=torch.float64), Codec("int8", 64)).isnan().all()
    )
    wide = torch.linspace(-3e38, 3e38, 64)
    assert round_trip(wide, Codec("int8", 64, symmetric=False)).isnan().all()


@named
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert (round_trip(torch.zeros(codec.block * 3), codec, 5) == 0).all()


@pytest.mark.parametrize("code", ["int8", "int4"])
def test_stochastic_rounding_is_right_on_average(code: str) -> None:
    codec = Codec(code, 64, rounding="stochastic")
    x = gaussian(640)
    mean = torch.stack([round_trip(x, codec, seed) for seed in range(400)]).mean(0)
    nearest = round_trip(x, Codec(code, 64))
    assert error(mean, x) < error(nearest, x) / 5


FEEDBACK = [dataclasses.replace(codec, feedback=True) for codec in ALL_CODECS]


def sent_with(errors: Tensor, x: Tensor, codec: Codec, seed: int = 0) -> Tensor:
    """What readers decode of `x`, coded with the errors of before, which it renews."""
    parcels = Parcels((Member("x", x.numel(), x.numel(), x.dtype),), codec, 1)
    wire = torch.empty(parcels.shape, dtype=torch.uint8)
    Reference(Pack(parcels))([x], [wire, errors], seed)
    return run(Unpack(parcels), [wire[None]])[0]


def no_errors(codec: Codec, num_blocks: int) -> Tensor:
    return torch.zeros(1, codec.errors.parcel_bytes(num_blocks), dtype=torch.uint8)


@pytest.mark.parametrize("codec", FEEDBACK, ids=lambda codec: codec.name)
def test_feedback_pays_back_what_coding_took(codec: Codec) -> None:
    """The mean of what was sent in 40 steps."""
    x, errors = gaussian(codec.block * 20), no_errors(codec, 20)
    paid = torch.stack([sent_with(errors, x, codec, seed) for seed in range(40)]).mean(0)
    lost = torch.stack([round_trip(x, codec.plain, seed) for seed in range(40)]).mean(0)
    share = 2 if codec.rounding == "stochastic" else 5
    assert error(paid, x) < error(lost, x) / share


@pytest.mark.parametrize("codec", FEEDBACK, ids=lambda codec: codec.name)
def test_errors_of_what_is_not_finite_or_of_a_burst_do_not_last(codec: Codec) -> None:
    x = gaussian(codec.block * 4)
    for bad in (torch.inf, torch.nan, 1e30):
        errors = no_errors(codec, 4)
        burst = x.clone()
        burst[codec.block + 3] = bad
        first = sent_with(errors, burst, codec).view(4, -1)
        assert first[[0, 2, 3]].isfinite().all()
        # Of a finite burst, a fifth of what the numbers beside it lost is owed.
        after = [sent_with(errors, x, codec, seed) for seed in range(20)]
        usual = error(round_trip(x, codec.plain), x)
        assert error(after[0], x) < usual + (0.2 if bad == 1e30 else 0.3 * usual)
        assert error(after[-1], x) < 1.6 * usual, "a step is off by more, their mean by less"


@named
@pytest.mark.parametrize("num_sources", [1, 3, 4])
def test_a_mean_over_sources_is_theirs(codec: Codec, num_sources: int) -> None:
    parcels = Parcels((Member("x", 1000, 500, torch.float32),), codec, 2)
    wires = [run(Pack(parcels), [gaussian(1000, seed)], seed)[0] for seed in range(num_sources)]
    each = [run(Unpack(parcels), [wire[None]])[0] for wire in wires]
    (mean,) = run(Unpack(parcels, num_sources), [torch.stack(wires)])
    torch.testing.assert_close(mean, torch.stack(each).mean(0))


ODD = (Member("a", 999, 250, torch.float32), Member("b", 7, 4, torch.bfloat16))


COMPILED = [Codec("int8", 64), Codec("fp8", 64)]
COMPILED += [Codec("int4", 64, symmetric=False, rounding="stochastic", feedback=True)]


@pytest.mark.parametrize("codec", COMPILED, ids=lambda codec: codec.name)
def test_inductor_makes_the_same_bits(codec: Codec) -> None:
    """Strided rows, short ends and empty chunks, with all extremes; once with other sizes, too."""
    sizes = [(ODD, 4, 2), ((Member("c", 3000, 1000, torch.float32),), 3, 1)]
    for members, num, nodes in sizes if codec is COMPILED[0] else sizes[:1]:
        parcels = Parcels(members, codec, num, nodes)
        tensors = [values_for((m.numel,), m.dtype, 4) for m in members]
        wires = wires_for(Unpack(parcels, 2), 5)
        repack = Repack(parcels.num_blocks, num, 2, codec, Codec("int8", 64, feedback=True))
        for spec, inputs in (
            (Pack(parcels), tensors),
            (Unpack(parcels, 2), [wires]),
            (repack, [wires]),
        ):
            plain, compiled = run(spec, inputs, 9), run(spec, inputs, 9, compiled=True)
            for got, want in zip(compiled, plain, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", [Codec("int4", 64), Codec(rounding="stochastic", feedback=True)])
def test_a_kernel_finds_operands_wherever_they_lie(codec: Codec) -> None:
    """Views are worked out once; the next operands lie elsewhere, in the middle of larger ones."""
    parcels = Parcels(
        (Member("x", 900, 450, torch.float32), Member("y", 77, 39, torch.bfloat16)), codec, 2
    )
    kernel = Reference(Pack(parcels))
    for seed in range(3):
        inputs = [values_for(shape, dtype, seed) for shape, dtype in kernel.spec.inputs]
        wanted = outputs_for(kernel.spec, seed)
        apart = [torch.cat([x.new_zeros(16 * seed), x])[16 * seed :] for x in inputs]
        into = [torch.cat([x.new_zeros(8 * seed, x.shape[1]), x])[8 * seed :] for x in wanted]
        kernel(apart, into, seed)
        Reference(kernel.spec)(inputs, wanted, seed)
        for got, want in zip(into, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_operands_are_checked() -> None:
    parcels = Parcels((Member("x", 64, 64, torch.float32),), Codec("int8", 64), 1)
    good, wire = torch.zeros(64), torch.empty(parcels.shape, dtype=torch.uint8)
    for inputs, outputs, says in (
        ([], [wire], "0 inputs"),
        ([good.double()], [wire], "float64"),
        ([good[:63]], [wire], r"\[63\]"),
        ([torch.zeros(128)[::2]], [wire], "not contiguous"),
        ([good], [wire[:, :-4].contiguous()], "uint8"),
        ([good], [wire.to("meta")], "several devices"),
    ):
        with pytest.raises(KernelError, match=says):
            Reference(Pack(parcels))(inputs, outputs)


def test_every_kind_is_among_the_codecs() -> None:
    kinds = {(c.code, c.symmetric, c.rounding) for c in ALL_CODECS}
    codes, both = ("int8", "int4"), (True, False)
    assert kinds >= set(itertools.product(codes, both, ("nearest", "stochastic")))
