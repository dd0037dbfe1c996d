"""What a rank of `tests.ranks` runs: join the process group, then serve jobs until told to end."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.frames import with_room_for_frames


def serve(
    rank: int,
    world_size: int,
    backend: str,
    port: int,
    connection: Connection,
    stacks: str,
    log: str,
    env: dict[str, str],
) -> None:
    """Answers each job with `(True, result)` or `(False, (kind, message, traceback))`."""
    os.setpgid(0, 0)
    end_with_the_session()
    redirect_output(log)
    stacks_file = open(stacks, "ab", buffering=0)  # noqa: SIM115 - open for the process's life
    faulthandler.enable(stacks_file)
    faulthandler.register(signal.SIGUSR1, stacks_file, all_threads=True)
    # Python knows nothing of the threads of torch and gloo; this writes their stacks to the log.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    environment = dict(os.environ)
    torch.set_num_threads(1)
    spare_what_nobody_reads()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    _answer(connection, (True, None))
    for number in itertools.count():
        if (job := _next_job(connection)) is None:
            break
        _fresh_state(environment)
        place = dist.PrefixStore(f"job {number}", store)
        dist.init_process_group(backend, store=place, rank=rank, world_size=world_size)
        outcome = _run(*job)
        del job
        _answer(connection, outcome)
        del outcome
    _leave_groups()


def _run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    try:
        module, _, path = name.partition(":")
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        return True, with_room_for_frames(function, *args, **kwargs)
    except (Exception, SystemExit) as error:
        return False, (type(error).__name__, str(error), traceback.format_exc())


def _answer(connection: Connection, outcome: tuple[bool, Any]) -> None:
    buffer = io.BytesIO()
    try:
        torch.save(outcome, buffer)
    except Exception as error:
        buffer = io.BytesIO()
        message = f"the result cannot be sent: {error}"
        torch.save((False, (type(error).__name__, message, traceback.format_exc())), buffer)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(buffer.getvalue())


def _next_job(connection: Connection) -> Any:
    try:
        return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
    except EOFError:
        return None


def _fresh_state(environment: dict[str, str]) -> None:
    """Undoes what a job may leave behind in the process, so that jobs do not see each other."""
    os.environ.clear()
    os.environ.update(environment)
    torch._dynamo.reset()
    _leave_groups()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    # What is left belongs to modules. Looking at it again, all of torch, would take most of the
    # time of a short job: of collections between jobs, and of zerofx's own search for optimizers.
    gc.collect()
    gc.freeze()
    random.seed(0)
    torch.manual_seed(0)


def _leave_groups() -> None:
    """Destroys all process groups: a thread of each of gloo's wakes a hundred times a second.

    What DTensor remembers by mesh goes too, since the groups of an equal mesh have other names.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    for mesh in [found for found in gc.get_objects() if type(found) is DeviceMesh]:
        vars(mesh).get("_pg_registry", {}).clear()
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()


def spare_what_nobody_reads() -> None:
    """Let a compilation do without what only logs show: a tenth of a second of a processor.

    Dynamo times the guards of each frame, with caches that it empties first, and takes each file
    that it traces apart for the names of functions; AOTAutograd prints its graphs, and makes states
    for a kind of random numbers that nobody asks for. Each compilation notes down all settings of
    torch. And a process group that begins makes Dynamo look up all names of torch again, for
    processes that compiled before they had imported it whole.
    """
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker
    from torch._dynamo import symbolic_convert, trace_rules, utils
    from torch._functorch._aot_autograd import graph_compile

    trace_rules.clear_lru_cache = lambda: None
    symbolic_convert.get_funcname = lambda *_: None
    for settings in (
        "_get_dynamo_config_for_logging",
        "_scrubbed_inductor_config_for_logging",
        "_compiler_config_for_logging",
        "_functorch_config_for_logging",
    ):
        setattr(utils, settings, lambda: None)
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    graph_compile._log_joint_graph = lambda *_: None
    graph_compile._log_fw_bw_graphs = lambda *_: (None, None)
    PhiloxStateTracker.reset = classmethod(lambda _: None)


def redirect_output(log: str, errors: str = "") -> None:
    """Sends everything a rank prints, C++ too, to its own file or two, which failures quote."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(log, flags), 1)
    os.dup2(os.open(errors, flags) if errors else 1, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def end_with_the_session() -> None:
    """Leaves no rank behind, not even a hung one, when the test process is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="watch parent").start()
