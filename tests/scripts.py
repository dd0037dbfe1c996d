"""Scripts on ranks of their own, and modules alone, without a process that imports torch anew.

    printed = run_script(EXAMPLES / "quickstart.py", "--steps", "3", ranks=2)

Ranks are forked from a process that has imported torch, and find in their environment what torchrun
would tell them. Variables that torch reads when it is imported come too late: use torchrun.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.frames import with_room_for_frames
from tests.rank_worker import end_with_the_session, redirect_output
from tests.ranks import GRACE_SECONDS, forkserver, patience, worker_env


def run_script(
    script: Path, *arguments: str, ranks: int = 2, timeout: float = 150, without: str = ""
) -> str:
    """Run a script on some ranks; returns what they wrote to standard output, rank by rank.

    Args:
        script: what to run.
        arguments: of the script.
        ranks: how many.
        timeout: seconds, times the processes of pytest that share the machine.
        without: a package that cannot be imported there, and none of whose operations is found.
    """
    timeout = patience(timeout)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    env = {**os.environ, **worker_env()}
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    # The store is there already, as torchrun's agent has one.
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        files = [(f"{folder}/out{rank}", f"{folder}/errors{rank}") for rank in range(ranks)]
        what = (env, str(script), arguments, without)
        processes = [
            forkserver().Process(target=_run, args=(rank, *files[rank], *what))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, timeout)
        finally:
            for process in processes:
                if process.is_alive() and process.pid:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.join()
        texts = [[Path(file).read_text(errors="replace") for file in pair] for pair in files]
    codes = [process.exitcode for process in processes]
    assert codes == [0] * ranks, (codes, *(text[-3000:] for pair in texts for text in pair))
    return "".join(printed for printed, _ in texts)


def run_module(
    name: str, *arguments: str, timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """What `python -m name arguments` does in this folder, as no rank."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as logs:
        out, errors = Path(logs, "out"), Path(logs, "errors")
        what = (str(out), str(errors), env, os.getcwd(), name, arguments)
        process = forkserver().Process(target=_run_module, args=what)
        process.start()
        process.join(patience(timeout))
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        texts = [file.read_text(errors="replace") for file in (out, errors)]
    return subprocess.CompletedProcess([name, *arguments], process.exitcode, *texts)


def _run_module(
    log: str, errors: str, env: dict[str, str], folder: str, name: str, arguments: tuple[str, ...]
) -> None:
    os.setpgid(0, 0)
    end_with_the_session()
    redirect_output(log, errors)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    sys.path.insert(0, folder)
    with_room_for_frames(runpy.run_module, name, run_name="__main__", alter_sys=True)


def _join(processes: list[Any], timeout: float) -> None:
    """Waits for every rank; after a first failure, only a short grace for the others."""
    deadline = time.monotonic() + timeout
    pending = {process.sentinel: process for process in processes}
    while pending and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(pending), left):
            process = pending.pop(sentinel)
            process.join()
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _run(
    rank: int,
    log: str,
    errors: str,
    env: dict[str, str],
    script: str,
    arguments: tuple[str, ...],
    without: str,
) -> None:
    os.setpgid(0, 0)
    end_with_the_session()
    redirect_output(log, errors)
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if without:
        for name in [name for name in sys.modules if name.partition(".")[0] == without]:
            del sys.modules[name]
        sys.modules[without] = None  # pyright: ignore[reportArgumentType] - how Python spells it
        setattr(torch.ops, without, None)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    with_room_for_frames(runpy.run_path, script, run_name="__main__")
