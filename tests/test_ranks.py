"""The pool of ranks itself: results, failures, hangs, deaths, and a clean slate between jobs."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, patience, run_ranks


def _report(offset: int, scale: float = 1.0) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([scale * (dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total, os.getpid()


def _fail_on_last_rank() -> None:
    print("about to fail")
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("the last rank is unhappy")
    dist.barrier()


def _wait_for_ever_on_rank_0() -> None:
    if dist.get_rank() == 0:
        _a_function_that_hangs()


def _a_function_that_hangs() -> None:
    dist.recv(torch.zeros(1), src=1)


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def _crash_in_a_native_thread(times: int, folder: str) -> int:
    """On rank 1, `times` times in the pools of this test; then returns how often it was called."""
    if dist.get_rank() == 0:
        dist.barrier()
        return 0
    calls = len(os.listdir(folder)) + 1
    Path(folder, str(calls)).touch()
    if calls <= times:
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        strlen = ctypes.cast(libc.strlen, ctypes.c_void_p)
        libc.pthread_create(ctypes.byref(thread), None, strlen, None)
        time.sleep(60)
    dist.barrier()
    return calls


def _corrupt_the_heap(times: int, folder: str) -> int:
    """On rank 1: frees what malloc never gave out, which malloc notices there and then."""
    calls = len(os.listdir(folder)) + 1
    dist.barrier()
    if dist.get_rank() == 1:
        Path(folder, str(calls)).touch()
        if calls <= times:
            block = ctypes.create_string_buffer(64)
            ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(block) + 8))
    dist.barrier()
    return calls


def _hang_over_a_crash(times: int, folder: str) -> int:
    """As above; but what torch prints about a fatal signal begins, and does not end."""
    calls = len(os.listdir(folder)) + 1
    dist.barrier()
    if dist.get_rank() == 1:
        Path(folder, str(calls)).touch()
        if calls <= times:
            print(f"SIGSEGV(11), PID: {os.getpid()}, Thread {os.getpid()}: ", file=sys.stderr)
            time.sleep(60)
    dist.barrier()
    return calls


def _dirty_the_process() -> None:
    os.environ["ZEROFX_LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.rand(3)


def _state() -> tuple[str | None, torch.dtype, bool, int, float]:
    left = os.environ.get("ZEROFX_LEFT_BEHIND")
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    return left, dtype, torch.is_grad_enabled(), threads, torch.rand(1).item()


def _a_lambda() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_come_in_rank_order_from_lasting_processes(world_size: int) -> None:
    first = run_ranks(world_size, _report, 1, scale=2.0)
    again = run_ranks(world_size, "tests.test_ranks:_report", 1)
    total = world_size * (world_size + 1) / 2
    assert [rank for rank, _, _ in first] == list(range(world_size))
    assert [value.item() for _, value, _ in first] == [2 * total] * world_size
    assert [value.item() for _, value, _ in again] == [total] * world_size
    assert [pid for *_, pid in first] == [pid for *_, pid in again]


def test_an_exception_carries_rank_traceback_and_output_and_releases_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.ranks.GRACE_SECONDS", 1.0)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _fail_on_last_rank, timeout=100)
    raised, hung = caught.value.failures[1], caught.value.failures[0]
    assert (raised.kind, raised.message) == ("ValueError", "the last rank is unhappy")
    assert "in _fail_on_last_rank" in raised.details and "about to fail" in raised.output
    assert hung.kind == "Hung" and "in _fail_on_last_rank" in hung.details
    assert "of the first failure" in hung.message, "rank 0 was left waiting for the whole time-out"
    assert "the last rank is unhappy" in str(caught.value)
    assert len(run_ranks(2, _report, 0)) == 2


def test_a_hang_gives_the_stacks_and_the_next_job_a_new_pool() -> None:
    before = run_ranks(2, _report, 0)
    with pytest.raises(RanksFailed, match=f"no answer within {patience(1):g} s") as caught:
        run_ranks(2, _wait_for_ever_on_rank_0, timeout=1)
    assert list(caught.value.failures) == [0]
    assert "in _a_function_that_hangs" in caught.value.failures[0].details
    after = run_ranks(2, _report, 0)
    assert not {pid for *_, pid in before} & {pid for *_, pid in after}


def test_a_dead_process_is_named_with_its_stack() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _die_on_rank_1)
    died = caught.value.failures[1]
    assert died.kind == "Died" and str(-signal.SIGSEGV) in died.message
    assert "in _die_on_rank_1" in died.details


def test_a_crash_in_a_native_thread_runs_once_more_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes: list[str] = []
    monkeypatch.setattr("tests.ranks.native_crashes", crashes)
    assert run_ranks(2, _crash_in_a_native_thread, 1, str(tmp_path)) == [0, 2]
    assert len(crashes) == 1 and "libc.so" in crashes[0]
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(RanksFailed, match="Crashed: the process ended with exit code -11"):
        run_ranks(2, _crash_in_a_native_thread, 2, str(again))


@pytest.mark.parametrize(
    ("job", "timeout", "shown", "again"),
    [
        (
            _hang_over_a_crash,
            2,
            r"of a fatal signal.*: (python|pt_main_thread), state S",
            "no answer",
        ),
        (_corrupt_the_heap, 30, r"free\(\): invalid pointer", "the process ended"),
    ],
)
def test_a_crash_that_hangs_or_hits_python_is_a_crash(
    job: Callable[..., int],
    timeout: int,
    shown: str,
    again: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crashes: list[str] = []
    monkeypatch.setattr("tests.ranks.native_crashes", crashes)
    assert run_ranks(2, job, 1, str(tmp_path), timeout=timeout) == [2, 2]
    assert len(crashes) == 1 and re.search(shown, crashes[0], re.DOTALL)
    folder = tmp_path / "again"
    folder.mkdir()
    with pytest.raises(RanksFailed, match=f"Crashed: {again}"):
        run_ranks(2, job, 2, str(folder), timeout=timeout)


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="the result cannot be sent"):
        run_ranks(2, _a_lambda)


def test_a_job_starts_from_a_clean_state() -> None:
    before = run_ranks(2, _state)
    run_ranks(2, _dirty_the_process)
    assert run_ranks(2, _state) == before
    assert before[0][:4] == (None, torch.float32, True, 1)


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(TypeError, match="top-level functions only"):
        run_ranks(2, lambda: None)
