"""Process groups whose ranks share one CUDA device."""

from __future__ import annotations

import ctypes

import pytest
import torch

GLOO = "cpu:gloo,cuda:gloo"
NCCL = "cpu:gloo,cuda:nccl"
"""What `init_process_group()` makes on a machine with GPUs."""

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
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= 23000


BACKENDS = [
    pytest.param(GLOO, id="gloo"),
    pytest.param(
        NCCL,
        id="nccl",
        marks=pytest.mark.skipif(not ranks_may_share(), reason="needs NCCL 2.30 for one device"),
    ),
]
