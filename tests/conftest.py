"""Fixtures that the whole test tree shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import close_pools


@pytest.fixture(scope="session", autouse=True)
def pools() -> Iterator[None]:
    """Closes the pools of gloo ranks, which start on first use, when the session ends."""
    yield
    close_pools()
