"""`latest`: where a run goes on, which may be something that all ranks need to have."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import NamedTuple

from zerofx.checkpoint.nodes import save_of
from zerofx.checkpoint.ranks import all_ranks
from zerofx.checkpoint.writer import below, complete_below, oldest_first, run_of, shown
from zerofx.sharding.paths import local_path


class _Offer(NamedTuple):
    """What a rank has.

    Attributes:
        step: the name that all ranks give it.
        save: a node's folder: which save it is of; else "".
        run: a part of a model: which save of which job it is of; else "".
    """

    step: str
    save: str
    run: str


def latest(
    folder: str | os.PathLike[str], part: str | None = None, *, node_local: bool = False
) -> Path | None:
    """The newest complete checkpoint directly below `folder`; `None` if there is none.

    Args:
        folder: of checkpoints.
        part: where ranks hold different models, whose checkpoints are `folder/<any name>/<part>`:
            the name of this rank's. Every rank of the job must call; what is found is the newest of
            which all of them have their part of one save: a run that resumed, and was killed, may
            have replaced some parts.
        node_local: they were saved so. Every rank of the job must call; what is found is the newest
            of which all nodes have their folder.
    """
    if part is None and not node_local:
        found = complete_below(local_path(folder))
        return found[-1] if found else None
    mine = _offers(local_path(folder), part, node_local)
    everyones = all_ranks().everyones(lambda: (part, list(mine)))
    ranks_of = collections.Counter(each for each, _ in everyones)
    held = collections.Counter((each, offer) for each, offers in everyones for offer in offers)
    whole = {
        each: [offer for offer in offers if held[each, offer] == ranks_of[each]]
        for each, offers in reversed(everyones)  # the order is that of a part's first rank
    }
    steps = [{(offer.step, offer.run) for offer in offers} for offers in whole.values()]
    for step, _, run in reversed(whole[everyones[0][0]]):
        if all((step, run) in each for each in steps):
            own = (
                offer for offer in reversed(whole[part]) if (offer.step, offer.run) == (step, run)
            )
            return mine[next(own)]
    return None


def _offers(folder: Path, part: str | None, node_local: bool) -> dict[_Offer, Path]:
    """What this rank has, the oldest first."""
    found: dict[_Offer, Path] = {}
    places = [folder] if part is None else below(folder)
    paths = [path for each in places for path in complete_below(each, all_replaced=node_local)]
    for path in oldest_first(paths):
        save = save_of(path) if node_local else ""
        if part in (None, shown(path)) and (save or not node_local):
            step = shown(path) if part is None else path.parent.name
            found[_Offer(step, save, "" if part is None else run_of(path))] = path
    return found
