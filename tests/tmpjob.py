from typing import Any
import torch, torch.distributed as dist
from tests.hard.pair import EAGER, Pair
from tests.models import batch, make
from tests.ranks import run_ranks, close_pools
def job(stage, opts):
    pair = Pair(make("gpt"), stage, {**EAGER, **opts}, rtol=0.05)
    pair.train(lambda run, number: run(*batch("gpt", dist.get_rank(), number)), 2)
    return "ok"
