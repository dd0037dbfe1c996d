"""Importing this does what a process does once, when it first compiles a model.

The process that ranks are forked from imports it, so that no rank does it again: for its cache
Inductor reads all of Triton's source, and it traces the patterns that it looks for.
"""

import torch
from torch._dynamo.utils import counters


@torch.no_grad()  # with a CUDA build of torch, a backward starts threads that no fork survives
def _compile() -> None:
    # Of products alone, so that nothing is left for g++; without a pool, which no fork shares.
    run = torch.compile(lambda x: x @ x, options={"compile_threads": 1})
    run(torch.ones(2, 2))
    torch._dynamo.reset()
    counters.clear()


_compile()
