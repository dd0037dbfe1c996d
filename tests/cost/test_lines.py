"""Memory as a function of batch size and depth: exact on programs made of equal blocks."""

from __future__ import annotations

import numpy as np
import pytest

from zerofx.cost.curve import Curve
from zerofx.cost.lines import NotAlikeError, deepen, line_through


def _curve(depth: int, batch: int, *, extra: str = "", pile: int = 0) -> Curve:
    """A forward that keeps 5 bytes a sample and block, with 7·batch + 3 more inside a block.

    Gradients in flight pile up by `pile` bytes a block, none of which are left at the end.
    """
    names, blocks, rows = ["embed"], [""], [[2 * batch, 0, 0, 11]]
    for block in range(depth):
        kept = 2 * batch + 5 * batch * block
        for kind, size in (("mm", kept + 7 * batch + 3), ("add", kept + 5 * batch)):
            names.append(f"{kind}_{block}")
            blocks.append(f"layers.{block}")
            rows.append([size, (100 + pile) * block, 13, 11])
    names.append("loss" + extra)
    blocks.append("")
    rows.append([2 * batch + 5 * batch * depth, 100 * depth, 0, 11])
    return Curve(tuple(names), tuple(blocks), np.array(rows, dtype=np.int64))


def test_a_batch_size_never_traced() -> None:
    line = line_through(_curve(4, 2), 2, _curve(4, 3), 3)
    assert np.array_equal(line.at(17), _curve(4, 17).live)


def test_a_depth_never_traced() -> None:
    few, more = (line_through(_curve(d, 2), 2, _curve(d, 3), 3) for d in (3, 4))
    deep = deepen(few, more, (3, 4, 40), few_grads=False)
    for batch in (1, 9):
        wanted = _curve(40, batch).live
        assert deep.at(batch)[:, 0].max() == wanted[:, 0].max()
        assert deep.at(batch)[:, 1].max() == wanted[:, 1].max()
        assert deep.at(batch)[:, 2:].max(axis=0).tolist() == [13, 11]


@pytest.mark.parametrize(("few_grads", "most"), [(False, 39 * 150), (True, 450 + 37 * 100)])
def test_gradients_in_flight_are_bounded_and_reduced_ones_grow(few_grads: bool, most: int) -> None:
    few, more = (line_through(_curve(d, 2, pile=50), 2, _curve(d, 3, pile=50), 3) for d in (3, 4))
    assert deepen(few, more, (3, 4, 40), few_grads=few_grads).at(1)[:, 1].max() == most


def test_programs_that_differ_are_refused() -> None:
    with pytest.raises(NotAlikeError):
        line_through(_curve(4, 2), 2, _curve(4, 3, extra="_fn"), 3)
    few, more = (line_through(_curve(d, 2), 2, _curve(d, 3), 3) for d in (3, 4))
    with pytest.raises(NotAlikeError, match="3 blocks where there should be 4"):
        deepen(few, more, (4, 5, 40), few_grads=False)
