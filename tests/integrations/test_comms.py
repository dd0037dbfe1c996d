"""`comms_logger`: what a report says of communication."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zerofx
from tests.integrations.examples import BASE, nested
from tests.integrations.profiled import COMMS, Mlp, rows, texts, train
from tests.ranks import run_ranks
from zerofx.integrations.deepspeed.calls import Call, calls_in, plain_name
from zerofx.torch_private import is_profiling


def _table(text: str) -> Counter[tuple[str, int]]:
    """Operations and bytes of the table, and how many each time."""
    lines = text.splitlines()
    start = max(number for number, line in enumerate(lines) if line.startswith("operation "))
    cells = [line.split() for line in lines[start + 1 :]]
    return Counter({(row[0], int(row[1].replace(",", ""))): int(row[2]) for row in cells})


def _seen(calls: list[tuple[str, int, int]]) -> Counter[tuple[str, int]]:
    return Counter((plain_name(name), num_bytes) for name, _, num_bytes in calls)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_table_has_what_the_process_group_was_asked(stage: int) -> None:
    flat = {**COMMS, "zero_optimization.stage": stage, "gradient_clipping": 1.0}
    lines, silent = run_ranks(2, train, "mlp", flat)
    told = texts(lines, "communication of step")
    assert [text.split(",")[0] for text in told] == [f"communication of step {n}" for n in (2, 4)]
    assert not texts(silent, "communication")
    for text in told:
        wanted = _seen(lines[lines.index(text) - 2])
        found = _table(text)
        received = Counter({key: n for key, n in found.items() if key[0] == "recv"})
        # A norm is added up by torch's functional collective, which the wire does not see.
        assert found - received - wanted == Counter({("all_reduce", 4 * 14): stage // 3})
        assert wanted and not wanted - found
        assert received.total() == sum(n for (name, _), n in wanted.items() if name == "send")


def test_named_operations_alone_are_shown() -> None:
    flat = {**COMMS, "zero_optimization.stage": 3, "comms_logger.prof_all": False}
    (silent, _) = run_ranks(2, train, "mlp", flat)
    assert not texts(silent, "communication"), "no operation is named"
    sends = {**flat, "comms_logger.prof_ops": ["isend"], "comms_logger.verbose": True}
    (lines, _) = run_ranks(2, train, "mlp", sends)
    for text in texts(lines, "communication"):
        calls = lines[lines.index(text) - 2]
        assert _table(text) == _seen([call for call in calls if call[0] == "isend"])
        listed = [int(row[1].replace(",", "")) for row in rows(text, "send") if len(row) == 5]
        assert listed == [num_bytes for name, _, num_bytes in calls if name == "isend"]


def _train_profiled() -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as own:
        lines = _train_while_profiled()
    assert any(event.name.startswith("gloo:") for event in own.events() or ())
    return lines


def _train_while_profiled() -> list[str]:
    model = Mlp()
    recipe = zerofx.from_deepspeed(nested({**BASE, **COMMS}), inner="eager")
    zerofx.shard(model, recipe.config)
    optimizer, lines = torch.optim.SGD(model.parameters()), list[str]()
    report = recipe.make_report(optimizer, recipe.make_scaler("cpu"), lines.append)
    for _ in range(2):
        report.step()
        dist.all_reduce(torch.ones(3))
    assert is_profiling()
    return lines


def test_a_profiler_of_ones_own_goes_on() -> None:
    lines: list[str] = run_ranks(2, _train_profiled)[0]
    assert lines[-1].endswith("step 2, on rank 0 of 2: not recorded, since another profiler ran")


def _drop_a_report() -> None:
    recipe = zerofx.from_deepspeed(nested({**BASE, **COMMS}))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    report = recipe.make_report(optimizer, recipe.make_scaler("cpu"), lambda text: None)
    report.step()
    assert is_profiling()
    del report
    assert not is_profiling()


def test_recording_ends_with_the_report() -> None:
    run_ranks(1, _drop_a_report)


def test_kernels_of_nccl_are_read() -> None:
    args = {"dtype": "BFloat16", "In msg nelems": 1000, "Out msg nelems": 8000, "Group size": 8}
    given = ("_allgather_base", "_reduce_scatter_base", "allreduce", "send")
    events = [
        {"name": name, "cat": kind, "ts": 5, "dur": 2.0, "args": {**args, "Collective name": each}}
        for each in given
        for name, kind in (("ncclDevKernel", "kernel"), ("record_param_comms", "cpu_op"))
    ]
    calls = calls_in(events, 16)
    names = ("all_gather", "reduce_scatter", "all_reduce", "send")
    assert calls == [Call(name, 2000, 0.002, 8) for name in names]
    # 16,000 bits in two microseconds.
    bandwidths = [pytest.approx(each.bandwidths) for each in calls]
    assert bandwidths == [(64, 56), (8, 7), (16, 14), (8, 8)]
