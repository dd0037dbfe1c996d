"""Models that exist nowhere whole: their values equal those of a single process, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import zerofx
from benchmarks.meters import peak_bytes
from tests.checkpoint.runs import Everything, Run, bitwise, full, sharded_by
from tests.contract.loops import refused
from tests.models import Mlp
from tests.ranks import run_ranks
from zerofx.errors import DivergedError, UnsupportedError
from zerofx.sharding import materialise, shard


class Custom(nn.Module):
    """What constructors do beyond `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=3)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        self.place = nn.Parameter(torch.randn(5, 16) * 0.02)
        self.register_buffer("angles", 1 / 1e4 ** (torch.arange(8.0) / 8), persistent=False)
        self.register_buffer("mask", torch.triu(torch.full((8, 8), float("-inf")), 1))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.head = nn.Linear(16, 50)
        self.head.weight = self.embed.weight
        self.apply(self._init)
        for name, param in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(param, 0, 0.001)
        nn.init.trunc_normal_(self.place)
        nn.init.orthogonal_(self.head.weight)
        nn.init.sparse_(layer.linear1.weight, 0.5)
        self.twin = copy.deepcopy(self.head)
        self.lstm, self.attention = nn.LSTM(4, 5, 2), nn.MultiheadAttention(8, 2)
        self.norm, self.conv = nn.BatchNorm1d(3), nn.Conv2d(3, 6, 3)
        nn.init.dirac_(self.conv.weight)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(5, 7))
        self.to(torch.bfloat16)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.02)
            module.bias.data.zero_()


def _llama() -> nn.Module:
    sizes = {"hidden_size": 20, "intermediate_size": 37, "vocab_size": 61}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))  # pyright: ignore[reportArgumentType]


def _initialised(build: Callable[[], nn.Module], stage: int) -> None:
    torch.manual_seed(3)
    wanted = build()
    after = torch.get_rng_state()
    torch.manual_seed(3 + 10 * dist.get_rank())  # rank 0's seed wins
    before = torch.get_rng_state()
    with zerofx.meta_init():
        model = build()
    zerofx.shard(model, sharded_by(stage))
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(before, after)
    if stage == 1:
        with zerofx.meta_init():
            torch.manual_seed(4 + dist.get_rank())
            again = build()
        zerofx.shard(again, sharded_by(stage))
        torch.manual_seed(4)
        bitwise(_values(again), _values(build()))
    bitwise(_values(model), _values(wanted))


def _values(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: full(value) for name, value in named}


@pytest.mark.parametrize("build", [Custom, Everything, _llama])
def test_meta_init_equals_a_single_process(build: Callable[[], nn.Module]) -> None:
    for stage in (1, 3):
        run_ranks(2, _initialised, build, stage)


def _trained() -> None:
    torch.manual_seed(0)
    with zerofx.meta_init():
        model = Everything()
    zerofx.shard(model, sharded_by(3))
    run, wanted = Run(3, build=lambda: model), Run(3)
    assert run.train(range(3)) == wanted.train(range(3))
    bitwise(run.state(), wanted.state())


def test_a_model_from_meta_init_trains_as_another() -> None:
    run_ranks(2, _trained)


class Reset(nn.Module):
    """Its parameters come from `reset_parameters` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(9, 30), nn.BatchNorm1d(30)
        self.attention, self.lstm = nn.MultiheadAttention(30, 2), nn.LSTM(30, 10)


def _from_meta() -> None:
    torch.manual_seed(3)
    wanted = Reset()
    torch.manual_seed(3 + dist.get_rank())
    with torch.device("meta"):
        model = Reset()
    zerofx.shard(model, sharded_by(3))
    bitwise(_values(model), _values(wanted))
    before = _values(model)
    with torch.device("meta"):
        model.later = nn.Linear(9, 30)
    zerofx.shard(model, sharded_by(3))
    assert all(torch.equal(_values(model)[name], value) for name, value in before.items())
    with torch.device("meta"):
        model.own = nn.Parameter(torch.randn(9, 2))
        model.register_buffer("angles", torch.arange(9.0), persistent=False)
    with refused("own (parameter)", "angles (buffer)", "meta_init", kind=UnsupportedError):
        zerofx.shard(model, sharded_by(3))
    with torch.device("meta"):
        bare = nn.Module()
        bare.weight = nn.Parameter(torch.empty(9, 2))
    with refused("weight (parameter)", "load_safetensors", kind=UnsupportedError):
        zerofx.shard(bare, sharded_by(3))


def test_plain_meta_models_are_reset() -> None:
    run_ranks(2, _from_meta)


def _from_rank_zero() -> None:
    torch.manual_seed(5)
    wanted = Everything()
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        torch.manual_seed(5)
        model = Everything()
    zerofx.shard(model, sharded_by(3))
    bitwise(_values(model), _values(wanted))
    with torch.device("meta" if dist.get_rank() == 0 else "cpu"):
        model = Mlp()
    with refused("without values", kind=DivergedError):
        zerofx.shard(model, sharded_by(3))


def test_values_of_rank_0_alone() -> None:
    run_ranks(2, _from_rank_zero)


def _on_two_kinds() -> None:
    elsewhere = "cpu" if dist.get_rank() == 0 else "meta"  # as an accelerator that differs
    with torch.device(elsewhere):
        model = Mlp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(materialise, "default_device", lambda: torch.device("meta"))
        with refused("on devices of type meta", kind=DivergedError):
            zerofx.shard(model, sharded_by(3))


def test_devices_of_two_kinds_are_refused() -> None:
    run_ranks(2, _on_two_kinds)


def test_buffers_that_constructors_computed_move_with_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def put(model: nn.Module, values: dict[int, Tensor]) -> None:
        seen.append({values[id(buffer)].device.type for buffer in model.buffers()})

    seen: list[set[str]] = []
    session = SimpleNamespace(device=torch.device("meta"), world=SimpleNamespace(size=1))
    session.buffers = SimpleNamespace(agree=list)
    monkeypatch.setattr(materialise, "put_buffers", put)
    with zerofx.meta_init():
        model = Custom()
    real = {name for name, buffer in model.named_buffers() if not buffer.is_meta}
    assert "angles" in real and "mask" not in real
    shard._broadcast_buffers(model, session, moves=True, again=False)  # type: ignore[arg-type]
    assert seen == [{"meta"}]


def test_each_rank_takes_its_own_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    for name, value in (("is_available", True), ("current_device_index", 0)):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    kind = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(chosen))
    assert materialise.default_device().type == "cuda" and not chosen
    monkeypatch.setenv("LOCAL_RANK", "3")
    materialise.default_device()
    materialise.default_device()
    assert chosen == [3], "a choice is not changed"


DEPTH, WIDTH = 12, 256
LAYER = (WIDTH * WIDTH + WIDTH) * 4


class Deep(nn.Module):
    """Initialised by the layers, initialised again, and optionally converted at the end."""

    def __init__(self, convert: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.apply(self._init)
        if convert:
            self.double()

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def _peak(convert: bool) -> tuple[int, int]:
    kept: list[Any] = []

    def build(mark: Callable[[], None]) -> None:
        torch.zeros(1)
        mark()
        with zerofx.meta_init():
            kept.append(Deep(convert))
        zerofx.shard(kept[0], sharded_by(3))

    peak, start = peak_bytes(build)
    return peak - start, sum(p.to_local().nbytes for p in kept[0].parameters())


@pytest.mark.parametrize("convert", [False, True])
def test_no_rank_ever_holds_more_than_its_shards_and_a_layer(convert: bool) -> None:
    for peak, shards in run_ranks(2, _peak, convert):
        # While values are converted, the shards of both kinds exist, and a layer of both.
        both, layers = (1.5, 3 * LAYER) if convert else (1, LAYER)
        assert shards <= peak <= both * shards + layers + 200_000, (peak, shards, LAYER)
