"""Calls of `from_deepspeed` that cannot be understood, whatever the file says."""

from __future__ import annotations

from typing import Any

import pytest

import zerofx
from zerofx.errors import ConfigError


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "given as list"),
        ({"train_batch_size": 1}, {}, "train_micro_batch_size_per_gpu is 0"),
        ({"train_batch_size": 2}, {"iner": "eager"}, "did you mean 'inner'"),
    ],
)
def test_calls_that_make_no_sense(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        zerofx.from_deepspeed(source, world_size=2, **options)
    assert message in str(raised.value)
