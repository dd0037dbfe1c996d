"""Starting torchruns, and ending all of them when one ends badly."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

MASTER_PORT = 29500


def torchrun(
    command: Sequence[str],
    ranks: int,
    hosts: int = 1,
    host: int = 0,
    master: str = "127.0.0.1",
) -> list[str]:
    """The command line that starts one host's ranks.

    Hosts agree on a port; one alone takes any that is free, since other jobs may be on its machine.
    """
    port = MASTER_PORT if hosts > 1 else _free_port()
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={hosts}", f"--node-rank={host}", f"--nproc-per-node={ranks}"),
        *(f"--master-addr={master}", f"--master-port={port}"),
        *command,
    ]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Have SIGTERM raise as Ctrl-C does, so that what was begun is ended."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_all(
    commands: Sequence[Sequence[str]],
    environment: dict[str, str],
    timeout: float | None = None,
    output: IO[bytes] | None = None,
) -> int:
    """Run commands at once; the first failure, the end of the time, or SIGTERM ends all of them.

    Raises:
        TimeoutError: they took longer.
        KeyboardInterrupt: Ctrl-C, or SIGTERM.
    """
    with terminable():
        return _run_all(commands, environment, timeout, output)


def _run_all(
    commands: Sequence[Sequence[str]],
    environment: dict[str, str],
    timeout: float | None,
    output: IO[bytes] | None,
) -> int:
    started: list[subprocess.Popen[bytes]] = []
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        for command in commands:
            started.append(
                # A session of its own, so that the end of the command is that of its children.
                subprocess.Popen(
                    command, env=environment, stdout=output, stderr=output, start_new_session=True
                )
            )
        while True:
            codes = [process.poll() for process in started]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"not done after {timeout:g} s")
            time.sleep(0.1)
    finally:
        for process in started:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return
