"""`TensorParallel` without a file: the loop that docs/parallelism.md shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.integrations.test_tensor_parallel import SPECS, STEPS, Gpt, alone, data
from tests.logs import heard
from tests.ranks import run_ranks
from zerofx.errors import ConfigError
from zerofx.integrations.tensor_parallel import PRESETS, Rule, TensorParallel, export_joined
from zerofx.integrations.tensor_parallel.linear import Cut
from zerofx.integrations.tensor_parallel.rules import rules_of


def _trained(folder: Path) -> None:
    model, parts = Gpt().double(), TensorParallel(2, rules_of(SPECS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    parts.parallelize(model)
    assert parts.part == dist.get_rank() % 2 and "blocks.0.qkv: outputs" in str(parts)
    options = {"mesh": parts.mesh["data"], "inner": "eager", "min_shard_numel": 0}
    run = torch.compile(model, backend="zero2", options=options)
    for step in range(STEPS):
        run(data(step).chunk(2)[dist.get_rank() // 2]).backward()
        parts.complete_gradients(model.parameters())
        norm = parts.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.ndim == 0 and norm > 0.5
        optimizer.step()
        optimizer.zero_grad()
    export_joined(model, folder, parts)


def test_parts_without_a_file(tmp_path: Path) -> None:
    run_ranks(4, _trained, tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for name, want in alone(Gpt)[1].named_parameters():
        torch.testing.assert_close(whole[name], want.detach(), rtol=1e-9, atol=1e-10)


def _with_slips_of_the_pen() -> list[str]:
    rules = (Rule("wrods", "whole"), Rule(r"blocks\.0\.norm_q", "outputs"), Rule(r"up", "outputs"))
    others = (Rule("head.bias", "summed"), Rule("nothing", "inputs", models=("llama",)))
    parts = TensorParallel(2, (*rules, *others, *PRESETS["bloom"], *rules_of(SPECS)))
    with heard("zerofx.integrations.tensor_parallel") as said:
        parts.parallelize(Gpt())
    return said


def test_rules_that_fit_nothing_are_named() -> None:
    """But for those of presets, and of other models."""
    first, second = run_ranks(2, _with_slips_of_the_pen)
    assert [each.split("'")[1] for each in first] == ["wrods", r"blocks\\.0\\.norm_q", "up"]
    assert all("Gpt" in each and "blocks.0.qkv.weight" in each for each in first) and not second


def test_rules_are_looked_at_when_they_are_made() -> None:
    wrong: Any = "colwise"
    with pytest.raises(ConfigError, match=r"'colwise' of how layers are held(.|\n)*'outputs'"):
        Rule("up", wrong)
    with pytest.raises(ConfigError, match=r"the pattern 'up\('"):
        Rule("up(", "outputs")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 1))
def test_parts_join(sections: list[int], size: int, dim: int) -> None:
    cut = Cut(dim, tuple(section * size for section in sections))
    whole = torch.arange(6 * sum(cut.sections)).view((-1, 6) if dim == 0 else (6, -1))
    parts = [whole.index_select(dim, cut.places(rank, size)) for rank in range(size)]
    assert torch.equal(cut.join(parts), whole)
    assert {part.shape[dim] for part in parts} == {sum(sections)}
