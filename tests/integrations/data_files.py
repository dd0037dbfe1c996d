"""Sections `data_efficiency` for tests, and the files of indexes that they name."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerofx.integrations.deepspeed.data_keys import (
    BATCHING,
    CURRICULUM,
    METRICS,
    RANDOM_LTD,
    ROUTING,
    SAMPLING,
)

DRAWN: dict[str, Any] = {"data_efficiency.enabled": True, f"{SAMPLING}.enabled": True}
PACKED: dict[str, Any] = {**DRAWN, f"{BATCHING}.enabled": True, f"{BATCHING}.max_tokens": 20}
ROUTED: dict[str, Any] = {
    "data_efficiency.enabled": True,
    f"{ROUTING}.enabled": True,
    f"{RANDOM_LTD}.enabled": True,
    f"{RANDOM_LTD}.total_layer_num": 3,
    f"{RANDOM_LTD}.random_ltd_layer_num": 2,
    f"{RANDOM_LTD}.random_ltd_layer_id": [0, 1],
    f"{RANDOM_LTD}.model_type": "decoder",
    f"{RANDOM_LTD}.hidden_state_order": "batch_seq_dim",
    f"{RANDOM_LTD}.random_ltd_schedule.min_value": 4,
    f"{RANDOM_LTD}.random_ltd_schedule.max_value": 16,
    f"{RANDOM_LTD}.random_ltd_schedule.schedule_type": "fixed_linear",
    f"{RANDOM_LTD}.random_ltd_schedule.schedule_config.require_steps": 8,
    f"{RANDOM_LTD}.random_ltd_schedule.schedule_config.seq_per_step": 2,
}
LINEAR = {"total_curriculum_step": 8, "difficulty_step": 2}


def metric(name: str = "<name>", /, **given: Any) -> dict[str, Any]:
    """Keys of a metric, and those that enable it."""
    values = {
        "index_to_sample_path": "samples",
        "index_to_metric_path": "metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 2,
        "max_difficulty": 10,
        "schedule_type": "fixed_linear",
        **given,
    }
    if values["schedule_type"] == "fixed_linear" and not any("." in key for key in given):
        values.update({f"schedule_config.{key}": value for key, value in LINEAR.items()})
    keys = {f"{METRICS}.{name}.{key}": value for key, value in values.items()}
    return {**DRAWN, f"{CURRICULUM}.enabled": True, **keys}


def write_indexed(path: Path, rows: Sequence[Sequence[int]], dtype: int = 4) -> str:
    """Write the two files that Megatron's and DeepSpeed's builders write; 4 means int32."""
    sizes = [len(row) for row in rows]
    pointers = [0, *itertools.accumulate(4 * size for size in sizes)][:-1]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, dtype, len(rows), 2)
    parts = (np.array(sizes, "<i4"), np.array(pointers, "<i8"), np.array([0, len(rows)], "<i8"))
    path.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    path.with_suffix(".bin").write_bytes(np.array(list(itertools.chain(*rows)), "<i4").tobytes())
    return str(path)


def write_index(folder: Path, name: str, difficulties: Sequence[int]) -> dict[str, str]:
    """Write what DeepSpeed's analyzer writes of a metric; returns the keys that name it."""
    values = sorted(set(difficulties))
    rows = [[i for i, each in enumerate(difficulties) if each == value] for value in values]
    return {
        "index_to_sample_path": write_indexed(folder / f"{name}_samples", rows),
        "index_to_metric_path": write_indexed(folder / f"{name}_metric", [[v] for v in values]),
    }
