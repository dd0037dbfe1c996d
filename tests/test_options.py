"""Every option refuses values it cannot use, by name and with what it may be."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.contract.loops import FAST, config, data, net
from tests.ranks import run_ranks
from zerofx.config import ZeroConfig, config_from_options
from zerofx.errors import ConfigError, ZeroFxError
from zerofx.option_checks import refuse_at_stage
from zerofx.passes.pipelines import pipeline

WRONG: dict[str, list[Any]] = {
    "stage": [4, -1, "3", None, True, 2.0],
    "inner": ["triton", None, 3],
    "mesh": [3, "shard"],
    "sequence_parallel": [0, True, "2"],
    "replicate": [0, True, 1.5, "2"],
    "ranks_per_node": [0, True, "2"],
    "secondary_shards": ["yes", 1, None],
    "accumulate": [0, None, 2.0],
    "broadcast_buffers": ["no", 0, None],
    "min_shard_numel": [-1, None, "5"],
    "max_replicated_numel": [-1, 1e3, True],
    "bucket_bytes": [-1, 1.5, "1MB"],
    "prefetch_bytes": [-1, 1.5, True],
    "memory_budget": [-1, "all"],
    "keep_freed_memory": ["yes", 1, None],
    "device_memory": [-1, 1e9],
    "param_dtype": ["bfloat16", torch.int8, torch.float8_e4m3fn],
    "reduce_dtype": ["float32", torch.int32],
    "grad_dtype": ["bf16", torch.int8, torch.float16],
    "quantize": [True, "always"],
    "quantize_weights": [("int8",), 8, True],
    "quantize_gradients": [("int8",), ("int8", 4), 8, (), 0, False],
    "quantize_exact": [5, None, (5,)],
    "drift_every": [0, True, 2.5],
    "output_dtype": ["float32", torch.int8],
    "cast_forward_inputs": ["x", 1, None],
    "verify": ["maybe", 1],
    "detect_anomaly": ["x", 0],
    "disable": [None, 5, (5,)],
    "passes": [5, None],
    "hang_timeout": [0, -1.0, "ten", None, True, math.inf, math.nan],
    "dump": [5, None],
    "measure": [-1, 1.5],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ConfigError) as caught:
            ZeroConfig(**{name: value})
        assert f"option {name}=" in str(caught.value) and "use " in caught.value.remedy, value


def test_every_option_is_tried() -> None:
    assert set(WRONG) == set(ZeroConfig.__dataclass_fields__)


def _rows() -> dict[str, str]:
    """Of docs/options.md, by option: its default, and what the docstring says of it."""
    doc = inspect.cleandoc(str(ZeroConfig.__doc__)).partition("Attributes:\n")[2]
    told = {name: " ".join(text.split()) for name, text in re.findall(_ATTRIBUTE, doc)}
    rows: dict[str, str] = {}
    for each in dataclasses.fields(ZeroConfig):
        default = "$ZEROFX_DUMP" if each.name == "dump" else repr(each.default)
        rows[each.name] = f"| `{each.name}` | `{default}` | {told[each.name]} |"
    return rows


_ATTRIBUTE = r"(?m)^    (\w+): ((?:.*\n?)(?:      .*\n?)*)"


def test_the_manual_has_every_option() -> None:
    """`ZEROFX_UPDATE_GOLDEN=1 pytest tests/test_options.py` writes its rows anew."""
    page = Path(__file__).parents[1] / "docs" / "options.md"
    text, rows = page.read_text(), _rows()
    written = re.findall(r"(?m)^\| `(\w+)` \|.*$", text)
    assert sorted([*written, "stage"]) == sorted(rows)
    renewed = re.sub(r"(?m)^\| `(\w+)` \|.*$", lambda row: rows[row[1]], text)
    if os.environ.get("ZEROFX_UPDATE_GOLDEN") == "1":
        page.write_text(renewed)
    assert page.read_text() == renewed


def test_one_text_is_a_list_of_one() -> None:
    given = ZeroConfig(disable="schedule", quantize_exact="*head*", dump=Path("a"))  # pyright: ignore[reportArgumentType]
    assert (given.disable, given.quantize_exact, given.dump) == (("schedule",), ("*head*",), "a")


def test_names_that_deepspeed_gave_to_zero_plus_plus() -> None:
    theirs = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    given = config_from_options(3, {**theirs, "zero_hpz_partition_size": 4})
    assert (given.quantize_weights, given.quantize_gradients) == ("int8", "int4")
    assert (given.secondary_shards, given.ranks_per_node) == (True, 4)
    off = dict.fromkeys(theirs, False) | {"zero_hpz_partition_size": 1}
    assert config_from_options(3, off) == ZeroConfig()
    wrong: list[dict[str, Any]] = [
        {"zero_quantized_weights": 1},
        {"zero_hpz_partition_size": True},
        {"zero_hpz_partition_size": -1},
        {"zero_hpz_partition_size": 4, "ranks_per_node": 2},
        {"zero_quantized_gradients": True, "quantize_gradients": "int8"},
    ]
    for options in wrong:
        with pytest.raises(ConfigError, match=next(iter(options))):
            config_from_options(3, options)


def _dumped(folders: list[str]) -> list[str]:
    said = [""] * len(folders)
    for at, folder in enumerate(folders):
        run = torch.compile(net(), backend="zero0", options={**FAST, "dump": folder})
        try:
            run(*data(0))
        except ConfigError as error:
            said[at] = str(error)
    return said


def test_folders_of_dumps(tmp_path: Path) -> None:
    """One that cannot be written is refused; each of the others has its own graphs, from 0 on."""
    (tmp_path / "file").touch()
    old = tmp_path / "two" / "graph0"
    (old / "backward").mkdir(parents=True)
    (old / "backward" / "program.py").write_text("of an older run")
    folders = [str(tmp_path / each) for each in ("file/dump", "one", "two")]
    ((refused, *fine),) = run_ranks(1, _dumped, folders)
    assert "option dump" in refused and "Remedy: name a folder" in refused
    assert fine == ["", ""]
    for folder in folders[1:]:
        assert [each.name for each in Path(folder).glob("graph*")] == ["graph0"]
    assert not (old / "backward").exists()


@pytest.mark.parametrize("option", ["memory_budget", "prefetch_bytes"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bounds_of_full_values_are_stage_3s(option: str, stage: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} has no meaning at stage {stage}"):
        zerofx.shard(net(), config(stage, **{option: 0}))


def test_options_that_only_say_of_what_serve_all_stages() -> None:
    """As docs/options.md says: a comparison of stages takes one set of options."""
    said = {"min_shard_numel": 9, "max_replicated_numel": 9, "replicate": 2, "ranks_per_node": 2}
    for stage in range(4):
        given = config(stage, **said, quantize_exact="*head*")
        refuse_at_stage(given)
        assert pipeline(given) == pipeline(config(stage))


def _told_to_share(ranks_per_node: int) -> str:
    try:
        zerofx.shard(net(), config(2, ranks_per_node=ranks_per_node))
    except ConfigError as error:
        return str(error)
    return ""


def test_nodes_have_equally_many_ranks() -> None:
    for said in run_ranks(3, _told_to_share, 2):
        assert "ranks_per_node=2 does not divide 3 ranks" in said
    assert run_ranks(3, _told_to_share, 8) == [""] * 3


def _limited() -> list[str]:
    said: list[str] = []
    options: dict[str, Any] = {"device_memory": 1 << 30}
    run = torch.compile(net(), backend="zero3", options={**FAST, **options})
    for attempt in (lambda: run(*data(0)), lambda: zerofx.shard(net(), config(2, **options))):
        with pytest.raises(ConfigError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_a_limit_of_memory_chooses_a_stage() -> None:
    ((compiled, sharded),) = run_ranks(1, _limited)
    for text, stage in ((compiled, 3), (sharded, 2)):
        assert f"device_memory has no meaning where the stage is given, here {stage}" in text
        assert 'Remedy: use backend="zero"' in text


def test_other_things_than_models_and_configurations_are_refused() -> None:
    model, wrong = nn.Linear(2, 2), "a (SGD|list|str) was given for the model"
    things: list[Any] = [torch.optim.SGD(model.parameters()), [model], "model"]
    for thing in things:
        for call in (zerofx.shard, zerofx.refresh, zerofx.drift):
            with pytest.raises(ZeroFxError, match=wrong):
                call(thing)
        with pytest.raises(ZeroFxError, match=wrong), zerofx.no_sync(thing):
            pass
    for given in ({"stage": 3}, 3):
        with pytest.raises(ConfigError, match=r"is no configuration(.|\n)*ZeroConfig\(stage=3"):
            zerofx.shard(model, given)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="given a dict"):
        zerofx.mark_sequence({"input_ids": torch.zeros(1, 2)})  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("stage", 'as in backend="zero2"'),
        ("stag", 'as in backend="zero2"'),
        ("zero_quantized_weight", "did you mean 'zero_quantized_weights'"),
        ("min_shard_numle", "did you mean 'min_shard_numel'"),
    ],
)
def test_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        config_from_options(3, {name: 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (zerofx.ZeroConfig(), r'is no dictionary(.|\n)*options={"config": ZeroConfig'),
        ([("accumulate", 2)], "is no dictionary"),
        ("", "is no dictionary"),
        ({3: 4}, "unknown option 3"),
    ],
)
def test_options_are_a_dictionary(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_options(3, options)
