"""Process groups whose ranks share one CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

GLOO = "cpu:gloo,cuda:gloo"
NCCL = "cpu:gloo,cuda:nccl"
"""Also for what is on the host; `init_process_group()` makes NCCL alone where there are GPUs."""

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


def ranks_may_share() -> bool:
    """Whether NCCL serves several ranks on one device; `NCCL_MULTI_RANK_GPU_ENABLE` is new."""
    if not torch.cuda.is_available():
        return False
    version = ctypes.c_int()  # torch tells the one that it was built with
    with contextlib.suppress(OSError):  # some builds of torch have it inside
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= 23000


@contextlib.contextmanager
def alone_over_nccl() -> Iterator[None]:
    """A process group of this process, and nothing left of what it compiled."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


BACKENDS = [
    pytest.param(GLOO, id="gloo"),
    pytest.param(
        NCCL,
        id="nccl",
        marks=pytest.mark.skipif(not ranks_may_share(), reason="needs NCCL 2.30 for one device"),
    ),
]
