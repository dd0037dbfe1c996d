"""Real ranks for tests: a pool of processes that lives as long as the test session.

    losses = run_ranks(2, train, "gpt", "zero3", timeout=120)     # one result per rank

A job is a top-level function (or "module:function") that every rank calls with the same arguments,
inside an initialised process group. A rank that raises, dies or hangs makes `run_ranks` raise
`RanksFailed`, which carries each rank's traceback or stacks and the tail of what it printed.
After any failure the pool is thrown away: its process group may hold half a collective.

A crash in a thread that belongs to torch or gloo, in which no Python runs, or a heap that malloc
finds corrupt, is not what a test is about: four such were seen in some forty thousand jobs. The job
then runs once more in a new pool, and the end of the test session shows the C++ stack. A second
crash fails.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.rank_failures import Failure, RanksFailed, native_crashes
from tests.rank_process import Worker
from tests.rank_worker import serve

GRACE_SECONDS = 20.0
START_SECONDS = 120.0
CUDA_ENV = {"ZEROFX_TEST_DEVICE": "cuda", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""All ranks share one device."""

Job = Callable[..., Any] | str


def run_ranks(
    world_size: int,
    function: Job,
    /,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on every rank; returns the results in rank order.

    A hang fails after `timeout` seconds, times the processes of pytest that share the machine.
    A `backend` that serves CUDA puts what `tests.models` makes there; all ranks share one device.
    """
    name, timeout = _importable_name(function), patience(timeout)
    try:
        return _run_once(world_size, backend, name, args, kwargs, timeout)
    except RanksFailed as failed:
        if all(failure.kind != "Crashed" for failure in failed.failures.values()):
            raise
        native_crashes.append(str(failed))
        return _run_once(world_size, backend, name, args, kwargs, timeout)


def patience(seconds: float) -> float:
    """How long to wait for what takes `seconds` at most where one process of pytest is alone."""
    return seconds * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def _run_once(
    world_size: int,
    backend: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
) -> list[Any]:
    pool = _POOLS.get((world_size, backend))
    if pool is None:
        pool = _POOLS[world_size, backend] = Pool(world_size, backend)
    try:
        return pool.run(name, args, kwargs, timeout)
    except BaseException:
        _POOLS.pop((world_size, backend)).kill()
        raise


def close_pools() -> None:
    """Ends every worker; the session fixture in `conftest.py` calls it."""
    global _session_dir
    while _POOLS:
        _POOLS.popitem()[1].close()
    if _session_dir is not None:
        _session_dir.cleanup()
        _session_dir = None


def _importable_name(function: Job) -> str:
    if isinstance(function, str):
        return function
    name = f"{function.__module__}:{function.__qualname__}"
    if _resolve(name) is function:
        return name
    raise TypeError(f"{name} is not importable by name; ranks run top-level functions only")


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


class Pool:
    """`world_size` workers joined in one process group over a store that the parent hosts."""

    def __init__(self, world_size: int, backend: str = "gloo"):
        # Hosted here, on a port the system picks: no race for a port, and no worker is special.
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        self.dir = Path(tempfile.mkdtemp(prefix=f"world{world_size}_", dir=_session_path()))
        self.backend = backend
        self.workers = [self._spawn(rank, world_size) for rank in range(world_size)]
        try:
            self._collect("start of the pool", START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def _spawn(self, rank: int, world_size: int) -> Worker:
        env = worker_env() | (CUDA_ENV if "cuda" in self.backend else {})
        ours, theirs = multiprocessing.Pipe()
        stacks, log = self.dir / f"rank{rank}.stacks", self.dir / f"rank{rank}.log"
        stacks.touch()
        log.touch()
        place = (rank, world_size, self.backend, self.store.port)
        args = (*place, theirs, str(stacks), str(log), env)
        # Inductor asks for GPUs when it is imported; after a fork there are none.
        context: Any = (
            multiprocessing.get_context("spawn") if "cuda" in self.backend else forkserver()
        )
        process = context.Process(target=serve, args=args, name=f"rank{rank}")
        with patch.dict(os.environ, worker_env()):
            process.start()
        theirs.close()
        return Worker(rank, process, ours, stacks, log)

    def run(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        message = _dumps((name, args, kwargs))
        failures: dict[int, Failure] = {}
        for worker in self.workers:
            worker.log_start = worker.log.stat().st_size
            try:
                worker.connection.send_bytes(message)
            except OSError:
                failures[worker.rank] = worker.died(GRACE_SECONDS)
        if failures:
            raise RanksFailed(name, failures)
        return self._collect(name, timeout)

    def _collect(self, name: str, timeout: float) -> list[Any]:
        """Waits for every rank; after a first failure, only a short grace for the others."""
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        pending: dict[Any, Worker] = {worker.connection: worker for worker in self.workers}
        deadline = time.monotonic() + timeout
        reason = f"no answer within {timeout:g} s"
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                worker = pending.pop(connection)
                outcome = self._receive(worker)
                if not isinstance(outcome, Failure):
                    results[worker.rank] = outcome
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    reason = f"no answer within {GRACE_SECONDS:g} s of the first failure"
                failures[worker.rank] = outcome
        for worker in pending.values():
            failures[worker.rank] = worker.hung(reason)
        if failures:
            raise RanksFailed(name, failures)
        return [results[worker.rank] for worker in self.workers]

    def _receive(self, worker: Worker) -> Any:
        try:
            fine, value = _loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return worker.died(GRACE_SECONDS)
        if fine:
            return value
        kind, message, details = value
        return Failure(worker.rank, kind, message, details, worker.output())

    def close(self) -> None:
        for worker in self.workers:
            try:
                worker.connection.send_bytes(_dumps(None))
            except OSError:
                continue
        give_up = time.monotonic() + GRACE_SECONDS
        for worker in self.workers:
            worker.process.join(max(0.0, give_up - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for worker in self.workers:
            try:
                # Each worker leads its own process group, which holds its compilers too.
                os.killpg(worker.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()


_POOLS: dict[tuple[int, str], Pool] = {}
_session_dir: tempfile.TemporaryDirectory[str] | None = None
_PRELOAD = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.distributed.checkpoint",
    "torch.utils.cpp_extension",
    "sympy.physics.units",
    "transformers.models.llama.modeling_llama",
    "pytest",
    "zerofx.frontend.backend",
    "tests.warm",
    "tests.frozen",  # the last one: it freezes what the others made
)


def _session_path() -> str:
    global _session_dir
    if _session_dir is None:
        _session_dir = tempfile.TemporaryDirectory(
            prefix="zerofx_ranks_", ignore_cleanup_errors=True
        )
    return _session_dir.name


def forkserver() -> Any:
    """Processes come from a server that has imported torch once: a new pool takes a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    with patch.dict(os.environ, worker_env()):
        ensure_running()
    return context


def worker_env() -> dict[str, str]:
    """What ranks are told, whatever they run."""
    env = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # It keeps the stack of each of the last two thousand collectives, and so what they ran in.
        "TORCH_FR_BUFFER_SIZE": "0",
    }
    if sys.platform == "linux":
        # Otherwise gloo looks the host's own name up, which fails on machines without DNS.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _dumps(value: Any) -> bytes:
    # Not the connection's own pickler: it passes tensors as shared memory owned by the worker.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
