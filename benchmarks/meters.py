"""Meters that look at zerofx and its peers from outside.

Live storages, calls at the process group, the CPU allocator's peak, and what a network interface
has sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

_MARK = "steady step begins"

Storages = dict[int, int]
"""Bytes by address."""


def live_storages() -> tuple[Storages, Storages]:
    """Memory that tensors hold, and memory that only bare storages hold (idle buffers)."""
    # A DTensor wraps a tensor that is found by itself.
    kinds = {Tensor, torch.nn.Parameter, torch.UntypedStorage}
    held: Storages = {}
    bare: Storages = {}
    for thing in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        if isinstance(thing, Tensor):
            _note(thing.untyped_storage, held)
        else:
            _note(lambda storage=thing: storage, bare)
    return held, {address: size for address, size in bare.items() if address not in held}


def _note(find: Callable[[], torch.UntypedStorage], found: Storages) -> None:
    # Fake tensors, and storages that gave their memory away, hold nothing.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        storage = find()
        if storage.device.type != "meta" and storage.data_ptr():
            found[storage.data_ptr()] = storage.nbytes()


class WireMeter:
    """Counts the bytes that this rank sends, as the usual ring algorithms would.

    Attributes:
        sent: bytes so far.
        on_call: called at every collective, before it.
    """

    def __init__(self) -> None:
        self.sent = 0.0
        self.on_call: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Count calls of `torch.distributed` inside."""
        with contextlib.ExitStack() as stack:
            for name, volume in _VOLUMES.items():
                if hasattr(dist, name):
                    wrapped = self._wrap(getattr(dist, name), volume)
                    stack.enter_context(patch.object(dist, name, wrapped))
            yield

    def _wrap(self, call: Callable[..., Any], volume: Callable[..., float]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.on_call()
            self.sent += volume(dist.get_world_size(kwargs.get("group")), *args)
            return call(*args, **kwargs)

        return counted


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _message(ranks: int, tensor: Tensor, *_: Any) -> float:
    return _bytes(tensor)


def _whole(ranks: int, out: Tensor, *_: Any) -> float:
    return _bytes(out) * (ranks - 1) / ranks


def _scattered(ranks: int, out: Tensor, whole: Tensor, *_: Any) -> float:
    return _bytes(whole) * (ranks - 1) / ranks


def _reduced(ranks: int, tensor: Tensor, *_: Any) -> float:
    return 2 * _bytes(tensor) * (ranks - 1) / ranks


_VOLUMES: dict[str, Callable[..., float]] = {
    "isend": _message,
    "all_gather_into_tensor": _whole,
    "all_gather_single": _whole,
    "reduce_scatter_tensor": _scattered,
    "reduce_scatter_single": _scattered,
    "all_reduce": _reduced,
    "broadcast": _whole,
}


def peak_bytes(train: Callable[[Callable[[], None]], None]) -> tuple[int, int]:
    """Most bytes that the CPU allocator had given out at once, and those given out at the start.

    Looks at what happens after `train(mark)` first calls `mark()`. All of it runs under the
    profiler, so that memory which only C++ holds (buckets, saved values) counts as well.
    """
    _count_in_all_threads()
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "trace.json")
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
            train(_mark)
        profiled.export_chrome_trace(trace)
        with open(trace) as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    begin = min(event["ts"] for event in events if event["name"] == _MARK)
    memory = sorted(
        (event["ts"], event["args"]["Total Allocated"])
        for event in events
        if event["name"] == "[memory]"
    )
    start = [total for when, total in memory if when < begin][-1]
    return max([start, *(total for when, total in memory if when >= begin)]), start


def _count_in_all_threads() -> None:
    """From here on, the allocator counts what threads without a profiler give back.

    It would never hear of a value that a thread of gloo's lets go of last.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _mark() -> None:
    with torch.profiler.record_function(_MARK):
        pass


def interface_bytes(interface: str) -> int:
    """Bytes that a network interface of this namespace has sent."""
    return sent_bytes(Path("/proc/net/dev").read_text(), interface)


def sent_bytes(text: str, interface: str) -> int:
    """The same, from the text of `/proc/net/dev`."""
    for line in text.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"there is no interface {interface!r} here")
