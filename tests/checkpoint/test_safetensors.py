"""Weights from and to safetensors: row by row in, tensor by tensor out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zerofx
import zerofx.sharding.weights
from benchmarks.meters import peak_bytes
from tests.checkpoint.runs import Everything, bitwise, full, sharded_by
from tests.checkpoint.test_init import DEPTH, LAYER, Deep
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx.checkpoint import export_safetensors, full_state_dict, open_source
from zerofx.errors import CheckpointError


def _llama(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 20, "intermediate_size": 37, "vocab_size": 61}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))  # pyright: ignore


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def _exported(folder: Path, max_shard_bytes: int, several: bool) -> None:
    model = _llama(0)
    wanted = _values(model)
    zerofx.shard(model, sharded_by(3))
    for _ in range(2):  # the second replaces the first
        export_safetensors(model, folder, max_shard_bytes=max_shard_bytes)
    assert (len(list(folder.glob("*.safetensors"))) > 1) is several
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            sizes = [content.get_tensor(name).nbytes for name in content.keys()]  # noqa: SIM118
            assert sum(sizes) <= max_shard_bytes or len(sizes) == 1
            assert "lm_head.weight" not in content.keys(), "tied weights are written once"  # noqa: SIM118
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    plain, info = loaded
    assert not any(info.values()), info
    bitwise(_values(plain), wanted)
    for again in (_llama(1), _on_meta()):
        zerofx.load_safetensors(again, folder, sharded_by(3))
        bitwise(_values(again), wanted)
        tokens = torch.arange(12).view(2, 6)
        with torch.no_grad():
            assert torch.equal(again(tokens).logits, plain(tokens).logits)
    export_safetensors(plain, folder / "low", dtype=torch.bfloat16)
    low = AutoModelForCausalLM.from_pretrained(folder / "low")
    assert (low.dtype, plain.config.dtype) == (torch.bfloat16, torch.float32)
    assert low.config.architectures == plain.config.architectures == ["LlamaForCausalLM"]


def _on_meta() -> nn.Module:
    with zerofx.meta_init():
        return _llama(1)


@pytest.mark.parametrize(("max_shard_bytes", "several"), [(10**9, False), (9000, True)])
def test_transformers_load_what_is_exported(
    tmp_path: Path, max_shard_bytes: int, several: bool
) -> None:
    run_ranks(2, _exported, tmp_path / "out", max_shard_bytes, several)


def _odd(folder: Path) -> None:
    torch.manual_seed(0)
    model = Everything()
    wanted = _values(model)
    zerofx.shard(model, sharded_by(3))
    export_safetensors(model, folder)
    for stage in (0, 1, 2, 3):
        other = Everything()
        zerofx.load_safetensors(other, folder, sharded_by(stage))
        bitwise(_values(other), wanted)


def test_every_sort_of_parameter_and_buffer(tmp_path: Path) -> None:
    run_ranks(2, _odd, tmp_path / "out")


class _Sharing(nn.Module):
    """Buffers that share memory, as those of rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(12.0).view(2, 6)
        self.weight = nn.Parameter(whole[0])
        for name, value in {"cos": whole[0], "sin": whole[1], "whole": whole}.items():
            self.register_buffer(name, value)


class _TwoNames(nn.Module):
    """A buffer that is persistent under its second name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.arange(3.0), persistent=False)
        self.register_buffer("second", self.first)
        self.register_buffer("third", self.first)


def test_a_buffer_whose_first_name_is_not_persistent(tmp_path: Path) -> None:
    export_safetensors(_TwoNames(), tmp_path)
    wanted = {"second": torch.arange(3.0)}
    bitwise(load_file(tmp_path / "model.safetensors"), wanted)
    bitwise(full_state_dict(_TwoNames()), wanted)


def test_values_that_share_memory(tmp_path: Path) -> None:
    export_safetensors(_Sharing(), tmp_path)
    bitwise(load_file(tmp_path / "model.safetensors"), dict(_Sharing().state_dict()))


class _Counter:
    """Counts the bytes that leave `safe_open`."""

    def __init__(self) -> None:
        self.read = 0

    def open(self, *args: Any, **kwargs: Any) -> Any:
        return _Counted(self, safe_open(*args, **kwargs))


class _Counted:
    def __init__(self, counter: _Counter, inner: Any, name: str = "") -> None:
        self._counter, self._inner, self._name = counter, inner, name

    def __enter__(self) -> Any:
        self._inner = self._inner.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._inner.__exit__(*args)

    def keys(self) -> Any:
        return self._inner.keys()

    def get_slice(self, name: str) -> Any:
        return _Counted(self._counter, self._inner.get_slice(name), name)

    def get_shape(self) -> Any:
        return self._inner.get_shape()

    def get_tensor(self, name: str) -> Tensor:
        return self._count(self._inner.get_tensor(name))

    def __getitem__(self, rows: Any) -> Tensor:
        return self._count(self._inner[rows])

    def _count(self, value: Tensor) -> Tensor:
        self._counter.read += value.nbytes
        return value


def _read(folder: Path) -> tuple[int, int, int]:
    """Bytes read, bytes of shards, and the peak of memory."""
    counter = _Counter()
    kept: list[Any] = []

    def build(mark: Callable[[], None]) -> None:
        torch.zeros(1)
        mark()
        with torch.device("meta"):
            kept.append(Deep(False))
        with patch.object(zerofx.sharding.weights, "safe_open", counter.open):
            zerofx.load_safetensors(kept[0], folder, sharded_by(3))

    peak, start = peak_bytes(build)
    shards = sum(param.to_local().nbytes for param in kept[0].parameters())
    bitwise(_values(kept[0]), _values(_deep()))
    return counter.read, shards, peak - start


def _deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep(False)


def _write(folder: Path) -> tuple[int, int]:
    """Most bytes that an export adds, and bytes of all parameters."""
    model = _deep()
    zerofx.shard(model, sharded_by(3))

    def export(mark: Callable[[], None]) -> None:
        torch.zeros(1)
        mark()
        export_safetensors(model, folder, max_shard_bytes=2 * LAYER)

    peak, start = peak_bytes(export)
    return peak - start, DEPTH * LAYER


def test_no_rank_reads_or_holds_more_than_its_part(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for rank, (added, everything) in enumerate(run_ranks(2, _write, folder)):
        # On rank 0 a file of two layers.
        assert added <= (2 * LAYER if rank == 0 else 0) + 100_000 < everything / 2, (rank, added)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == DEPTH * LAYER
    for read, shards, peak in run_ranks(2, _read, folder):
        assert read == shards
        assert shards <= peak <= 2 * shards + LAYER + 100_000, (peak, shards)


def _refused(folder: Path) -> None:
    model = Deep(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        folder.mkdir()
        del state["layers.0.bias"]
        state["layers.1.weight"] = torch.zeros(3, 4)
        state["more"] = torch.zeros(1)
        save_file(state, folder / "model.safetensors")
        (folder / "bad.safetensors").write_bytes(b"not a file of weights")
    dist.barrier()
    words = ("layers.0.bias is not in the files", "layers.1.weight: [3, 4]", "more is only in")
    with refused(*words, kind=CheckpointError):
        zerofx.load_safetensors(model, folder, sharded_by(3))
    with refused("bad.safetensors cannot be read", kind=CheckpointError):
        zerofx.load_safetensors(model, folder / "bad.safetensors", sharded_by(3))
    with refused("is no safetensors file", "save_pretrained", kind=CheckpointError):
        zerofx.load_safetensors(model, folder.parent / "nothing", sharded_by(3))
    del state["layers.1.weight"], state["layers.2.bias"]
    dist.barrier()  # the other rank has read the files
    if dist.get_rank() == 0:
        save_file(state, folder / "model.safetensors")
    dist.barrier()
    torch.manual_seed(0)
    with zerofx.meta_init():
        fresh = Deep(False)
    zerofx.load_safetensors(fresh, folder, sharded_by(3), strict=False)
    wanted = _values(_deep()) | {key: value for key, value in state.items() if key != "more"}
    if dist.get_rank() == 0:
        assert torch.equal(_values(fresh)["layers.1.weight"], wanted["layers.1.weight"])
    else:
        _values(fresh)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _refused, tmp_path / "out")


def _cannot_write(folder: Path) -> None:
    model = zerofx.shard(_llama(0), sharded_by(3))
    with pytest.raises(CheckpointError, match="NotADirectoryError on rank 0"):
        export_safetensors(model, folder)
    export_safetensors(model, folder.parent.parent / "good")


def test_what_the_first_rank_cannot_write_all_hear_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_ranks(2, _cannot_write, tmp_path / "file" / "model")


def test_a_name_in_two_files(tmp_path: Path) -> None:
    """The index says which one counts."""
    for number, file in enumerate("ab"):
        values = {"weight": torch.full((2, 2), float(number)), f"more.{file}": torch.ones(1)}
        save_file(values, tmp_path / f"{file}.safetensors")
    run_ranks(2, _read_twice, tmp_path)


def _read_twice(folder: Path) -> None:
    index = {f"more.{file}": f"{file}.safetensors" for file in "ab"}
    model = nn.Linear(2, 2, bias=False)
    zerofx.shard(model, sharded_by(3))
    for weight in ({"weight": "a.safetensors"}, {"weight": "b.safetensors"}, {}):
        if dist.get_rank() == 0:
            text = json.dumps({"weight_map": index | weight})
            (folder / "model.safetensors.index.json").write_text(text)
        dist.barrier()
        if weight:
            zerofx.load_safetensors(model, folder, strict=False)
            wanted = torch.full((2, 2), float(weight["weight"] == "b.safetensors"))
            assert torch.equal(_values(model)["weight"], wanted)
            assert torch.equal(open_source(folder).tensors("model.")["weight"].read(), wanted)
        else:
            for read in (
                lambda: zerofx.load_safetensors(model, folder),
                lambda: open_source(folder),
            ):
                with refused("weight is in a.safetensors, b.safetensors", kind=CheckpointError):
                    read()
        dist.barrier()
