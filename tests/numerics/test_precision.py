"""Mixed precision means what `fully_shard` means by the same `MixedPrecisionPolicy`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.oracle import assert_same, train
from tests.ranks import run_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": BF16},
    "bf16_reduced_in_fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "fp16_returned_in_fp32": {"param_dtype": FP16, "reduce_dtype": FP32, "output_dtype": FP32},
    "fp32_reduced_in_bf16": {"reduce_dtype": BF16},
}
ROWS = [
    ("mlp", "bf16", {"optimizer": "adamw", "clip": 0.1}),
    ("mlp", "fp32_reduced_in_bf16", {}),
    ("gpt", "bf16_reduced_in_fp32", {"optimizer": "adamw", "clip": 0.1}),
    ("gpt", "fp16_returned_in_fp32", {"micro_batches": 2}),
    ("frozen", "bf16_reduced_in_fp32", {}),
    ("cnn", "bf16", {"clip": 0.1}),
]


@functools.cache
def _oracle(name: str, policy: str | None) -> list[Any]:
    precision = None if policy is None else POLICIES[policy]
    return run_ranks(2, train, name, "fully_shard", precision=precision)


@pytest.mark.parametrize(("name", "policy", "loop"), ROWS)
def test_two_ranks_agree_bitwise(name: str, policy: str, loop: Mapping[str, Any]) -> None:
    precision = POLICIES[policy]
    want = run_ranks(2, train, name, "fully_shard", precision=precision, **loop)
    for stage in (1, 2, 3):
        options = {"inner": "eager"}
        job = (train, name, f"zero{stage}")
        got = run_ranks(2, *job, precision=precision, options=options, timeout=220, **loop)
        assert_same(got, want, rtol=0, keys=["losses", "norms", "params", "grads"])


@pytest.mark.parametrize(("name", "policy"), [("gpt", "bf16"), ("mlp", "fp16_returned_in_fp32")])
def test_stage_0_agrees(name: str, policy: str) -> None:
    """Bitwise in all but norms, which are sums over whole gradients and not over shards."""
    job, options = (train, name, "zero0"), {"inner": "eager"}
    got = run_ranks(2, *job, precision=POLICIES[policy], options=options, timeout=220)
    assert_same(got, _oracle(name, policy), rtol=0, keys=["losses", "params", "grads"])


def test_small_parameters_stay_replicated_and_are_cast() -> None:
    """Whole on every rank at rest, so in another dtype than the model computes with."""
    precision = POLICIES["bf16_reduced_in_fp32"]
    want = _oracle("mlp", "bf16_reduced_in_fp32")
    options = {"inner": "eager", "min_shard_numel": 100}
    got = run_ranks(2, train, "mlp", "zero3", precision=precision, options=options, timeout=220)
    assert_same(got, want, rtol=0, keys=["losses", "params", "grads"])


def test_through_inductor() -> None:
    """Kernels that Inductor fuses keep fp32 between operations, where eager rounds to bf16."""
    precision = POLICIES["bf16_reduced_in_fp32"]
    want = _oracle("gpt", "bf16_reduced_in_fp32")
    got = run_ranks(2, train, "gpt", "zero3", precision=precision, timeout=220)
    assert_same(got, want, rtol=2e-2)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_not_full_precision(policy: str) -> None:
    """What the tests above compare would differ if the policy were ignored."""
    with pytest.raises(AssertionError):
        assert_same(_oracle("mlp", policy), _oracle("mlp", None), rtol=1e-6)
