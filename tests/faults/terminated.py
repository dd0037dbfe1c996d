"""One rank of a run that SIGTERM ends while a checkpoint is being written.

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


def main(folder: Path, rank: int, num_ranks: int) -> None:
    """Train and save until told to end, then exit as most handlers do."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
