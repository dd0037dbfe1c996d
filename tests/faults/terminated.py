"""One rank of a run that SIGTERM ends while a checkpoint is being written.

Its handler leaves as most do, by `sys.exit`. Python loses that exception where the handler runs
inside a callback of a weak reference, and Dynamo in a guard written in Python: such a rank ends one
step later, when it finds that its peer is gone.

python -m tests.faults.terminated FOLDER RANK WORLD_SIZE
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.dying import OPTIONS, WIDTH, Layers
from zerofx import checkpoint
from zerofx.errors import RankGoneError


def main(folder: Path, rank: int, num_ranks: int) -> None:
    """Train and save until told to end."""
    told = False

    def leave(*_: Any) -> None:
        nonlocal told
        told = True
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        _train(folder, rank, num_ranks)
    except RankGoneError:
        if not told:
            raise
        sys.exit(128 + signal.SIGTERM)


def _train(folder: Path, rank: int, num_ranks: int) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = Layers()
    step: Any = torch.compile(model, backend="zero3", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters())
    saving = None
    for number in range(100_000):
        step(torch.randn(4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 5 == 4:
            if saving is not None:
                saving.wait()
            saving = checkpoint.async_save(folder / "saves" / f"{number:06}", model, optimizer)
        if number == 12:
            (folder / f"ready{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
