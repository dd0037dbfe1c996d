"""`flops_profiler`: what a report says of operations; a Trainer prints communication, too."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.integrations.examples import BASE, nested
from tests.integrations.loops import fresh_state
from tests.integrations.profiled import COMMS, FLOPS, MODELS, counted, rows, texts, train
from tests.integrations.test_trainer import Texts
from tests.ranks import run_ranks
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.operations import Counted, CountOperations, Counts
from zerofx.ir.spec import Region
from zerofx.torch_private import is_profiling


def _flops_text(name: str, flat: dict[str, Any], **how: Any) -> str:
    (lines,) = run_ranks(1, train, name, {**FLOPS, **flat}, **how)
    (text,) = texts(lines, "operations of step")
    assert isinstance(lines[lines.index(text) - 1], list), "after a step"
    return text


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_of_the_plain_model(name: str) -> None:
    forward, backward = counted(name)
    text = _flops_text(name, {"zero_optimization.stage": 3})
    assert text.startswith("operations of step 2, on rank 0 of 1")
    assert f"forward of a micro-batch: {forward:,} FLOP" in text
    assert f"backward of a micro-batch: {backward:,} FLOP" in text
    timed = [line.partition(":")[0] for line in text.splitlines() if line.endswith("GFLOP/s")]
    assert timed == ["the step of 2 micro-batches", "forward", "backward"]


def _products(width: int, inputs: int = 2) -> int:
    """Operations of a layer from or to 16 numbers; backward makes `inputs` products."""
    return (1 + inputs) * 2 * 32 * 16 * width


_BLOCKS = [_products(24, inputs=1) + _products(24), 2 * _products(32), 2 * _products(40)]
"""Nobody asks for the gradient of the first one's input."""


def test_blocks_that_are_compiled_alone_count() -> None:
    text = _flops_text("mlp", {"zero_optimization.stage": 3}, blocks=True)
    forward = counted("mlp")[0] - 2 * 32 * 16 * 5
    assert f"forward of a micro-batch: {forward:,} FLOP" in text
    (row, _) = rows(text, "2", "Block")
    assert row == ["2", "Block", "3", "3,216", f"{sum(_BLOCKS):,}", "100.0%"]
    assert [row[3] for row in rows(text, "up", "Linear")] == [
        f"{count:,}" for count in (_products(24, inputs=1), _products(32), _products(40))
    ]


@pytest.mark.parametrize(("depth", "levels"), [(-1, 4), (0, 1), (2, 3), (9, 4)])
def test_depths_and_classes(depth: int, levels: int) -> None:
    names = {"module_depth": depth, "top_modules": 2, "detailed": False}
    text = _flops_text("mlp", {f"flops_profiler.{name}": each for name, each in names.items()})
    found = [(row[0], row[1], row[2]) for level in range(5) for row in rows(text, str(level))]
    wanted = [
        ("0", "Mlp", "1"),
        ("1", "ModuleList", "1"),
        ("1", "Linear", "1"),
        ("2", "Block", "3"),
        ("3", "Linear", "6"),
    ]
    assert found == [row for row in wanted if int(row[0]) < levels]
    assert "(model)" not in text
    head = [f"{85:,}", f"{_products(5):,}", f"{100 * _products(5) / sum(counted('mlp')):.1f}%"]
    assert levels == 1 or rows(text, "1", "Linear") == [["1", "Linear", "1", *head]]


def test_the_tree_has_every_module() -> None:
    text = _flops_text("mlp", {"flops_profiler.profile_step": 2})
    assert text.startswith("operations of step 3")
    assert len(rows(text, "1")) == 1 + 1, "by default one class; the other is the second block"
    whole = f"{sum(counted('mlp')):,}"
    assert rows(text, "(model)") == [["(model)", "Mlp", "3,301", whole, "100.0%"]]
    for number, flops in enumerate(_BLOCKS):
        assert rows(text, str(number), "Block")[-1][3] == f"{flops:,}"


def test_operations_go_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "operations.txt"
    file.write_text("before\n")
    keys = {**FLOPS, "flops_profiler.output_file": str(file)}
    (spoken, silent) = run_ranks(2, train, "mlp", {**keys, "zero_optimization.stage": 3})
    assert not texts(spoken, "operations") and not texts(silent, "operations")
    text = file.read_text()
    assert text.startswith("before\noperations of step 2, on rank 0 of 2\n")
    assert text.count("operations of step") == 1, "rank 0 alone writes"
    assert f"parameters: {3301:,} elements, 1,6" in text, "about half of them"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("comms_logger.prof_ops", "all_reduce"),
        ("comms_logger.prof_ops", ["all_reduse"]),
        ("flops_profiler.module_depth", -2),
        ("flops_profiler.module_depth", 1.5),
        ("flops_profiler.output_file", "no/such/folder/file.txt"),
    ],
)
def test_values_that_cannot_be_served(key: str, value: Any) -> None:
    flat = {**BASE, **FLOPS, **COMMS, "comms_logger.prof_all": False, key: value}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        recipe = zerofx.from_deepspeed(nested(flat), world_size=1)
        recipe.make_report(optimizer, recipe.make_scaler("cpu"))


class Squares(nn.Module):
    """A layer large enough to be sharded, of few kernels: Inductor compiles it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(input_ids.float()) - labels[:, :1]).square().mean()}


def _trains_by_file(folder: str) -> str:
    from zerofx.integrations import Trainer, TrainingArguments

    fresh_state()
    file = Path(folder) / f"ds_config{dist.get_rank()}.json"
    keys = {**BASE, **FLOPS, **COMMS, "zero_optimization.stage": 2, "gradient_clipping": "auto"}
    file.write_text(json.dumps(nested(keys)))
    how: Any = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    how |= {"max_steps": 3, "per_device_train_batch_size": 2}
    args = TrainingArguments(folder, deepspeed=str(file), **how)
    trainer = Trainer(Squares(), args, train_dataset=Texts(20))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    assert not is_profiling()
    return printed.getvalue()


def test_a_trainer_prints_both(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    spoken, silent = run_ranks(2, _trains_by_file, str(tmp_path), timeout=200)
    assert "operations of step 2, on rank 0 of 2" in spoken
    assert "forward and backward: " in spoken and "communication of step 2" in spoken
    assert rows(spoken, "send") and "(model)" in spoken
    assert "operations" not in silent and "communication" not in silent


def test_of_programs_compiled_anew_the_last_counts() -> None:
    counts = Counts()
    for name, flops in (("a", 1), ("b", 10), ("a", 100)):
        counts.note(Counted(Region.FORWARD, ((7, name),), (("block", flops), ("", 1000))))
    assert counts.of(Region.FORWARD, {7}) == {"block": 110, "": 2000}
    assert not counts.of(Region.BACKWARD, {7}) and not counts.of(Region.FORWARD, {8})


def test_counting_changes_no_fingerprint() -> None:
    assert CountOperations() == CountOperations()
    assert repr(CountOperations()) == "CountOperations()"
