"""What two journals, or two plans, do not have in common, for errors."""

from __future__ import annotations


def first_difference(
    mine: list[str], my_count: int, theirs: list[str], their_count: int
) -> tuple[int, list[str], list[str]] | None:
    """Position and what follows on both sides, up to five entries; `None` if one is a prefix."""
    start = max(my_count - len(mine), their_count - len(theirs))
    stop = min(my_count, their_count)
    ours = mine[len(mine) - (my_count - start) :]
    other = theirs[len(theirs) - (their_count - start) :]
    for offset in range(stop - start):
        if ours[offset] != other[offset]:
            return start + offset, ours[offset : offset + 5], other[offset : offset + 5]
    return None


def diff(mine: list[str], theirs: list[str], rank: int, peer: int) -> list[str]:
    """Lines that only one side has, or from the first place on where the order differs."""
    ours_only = [line for line in mine if line not in theirs]
    theirs_only = [line for line in theirs if line not in mine]
    if not ours_only and not theirs_only:
        # The same lines in another order.
        pairs = enumerate(zip(mine, theirs, strict=False))
        start = next((place for place, (one, other) in pairs if one != other), 0)
        ours_only, theirs_only = mine[start:], theirs[start:]
    return [f"rank {rank}: {line}" for line in ours_only[:8]] + [
        f"rank {peer}: {line}" for line in theirs_only[:8]
    ]


def in_order(mine: list[str], theirs: list[str], rank: int, peer: int) -> list[str]:
    """What both issued from the first difference on; a rank that hangs has issued little more."""
    return [f"rank {rank}: {line}" for line in mine] + [f"rank {peer}: {line}" for line in theirs]
