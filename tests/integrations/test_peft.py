"""LoRA through PEFT: the frozen base is gathered, never reduced, and held once."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from benchmarks.meters import live_storages
from tests.hard.pair import EAGER, Pair, draw, full, same
from tests.hard.wire import watched
from tests.ranks import run_ranks
from zerofx.errors import CheckpointError, UnsupportedError

peft = pytest.importorskip("peft")

WIDTH, RANK = 64, 2


class Base(nn.Module):
    """What the adapters stand on: its layers are large beside them."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.layers(x)))


def adapted(dtype: torch.dtype = torch.float32, depth: int = 3) -> Any:
    """LoRA on every layer, not initialised to zero: both its matrices have gradients."""
    torch.manual_seed(0)
    targets = [f"layers.{place}" for place in range(depth)]
    config = peft.LoraConfig(r=RANK, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(Base(depth).to(dtype), config)


def loss_of(run: Any, number: int = 0) -> Tensor:
    x = draw(4, WIDTH, seed=number)
    return F.mse_loss(run(x), torch.zeros_like(x))


def is_adapter(name: str) -> bool:
    return "lora_" in name


def trained(stage: int) -> list[int]:
    """Parity with a plain model, then what a backward reduces: element counts of the messages."""
    pair = Pair(adapted(), stage)
    pair.train(loss_of, 3)
    plain = dict(pair.plain.named_parameters())
    for name, param in pair.model.named_parameters():
        assert param.requires_grad == is_adapter(name) == plain[name].requires_grad
        assert is_adapter(name) or param.grad is None
    frozen = {name for name in plain if not is_adapter(name)}
    before = adapted()
    for name, value in before.named_parameters():
        if name in frozen:
            same(full(pair.model.get_parameter(name)), value.detach(), name)
    loss = loss_of(pair.run)
    with watched() as wire:
        loss.backward()
    return [numel for _, numel, _ in wire.calls]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trains_as_a_plain_model_and_reduces_adapters_only(stage: int) -> None:
    adapters = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    for sent in run_ranks(2, trained, stage, timeout=120):
        # Stage 3 gathers the base again; what it reduces comes on top.
        base = 3 * WIDTH * WIDTH // 2 if stage == 3 else 0
        assert adapters / 2 <= sum(sent) <= base * 1.1 + adapters, sent


def held(stage: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes alive after a step, gradients held; and elements of base and adapters."""
    gc.collect()
    gc.freeze()  # what is there already is not found below
    model = adapted(dtype)
    sizes = dict.fromkeys((True, False), 0)
    for param in model.parameters():
        sizes[not param.requires_grad] += param.numel()
    options = {**EAGER, "memory_budget": 0 if stage == 3 else None}
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    for number in range(2):
        optimizer.zero_grad()
        loss_of(lambda x: run(x.to(dtype)).float(), number).backward()
        optimizer.step()
    grads = [param.grad for param in model.parameters()]  # a tensor is found once read
    gc.collect()
    alive = sum(live_storages()[0].values())
    del grads
    torch.compiler.reset()
    return alive, sizes[True], sizes[False]


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16), (3, torch.float32)],
)
def test_memory_is_the_formula(stage: int, dtype: torch.dtype) -> None:
    for alive, base, adapters in run_ranks(2, held, stage, dtype, timeout=120):
        of_base = base * dtype.itemsize / (2 if stage == 3 else 1)
        of_adapters = adapters * (16 / 2 if stage == 3 else 4 + 12 / 2)
        assert alive == pytest.approx(of_base + of_adapters, rel=0.03), (alive, base, adapters)


def saved(stage: int, depth: int, folder: str) -> None:
    """Adapters go to disk and come back over a plain base; merged, they compute the same."""
    from zerofx.integrations import save_adapters

    # Of four gradients, sums in another order round otherwise.
    rtol = 0.0 if dist.get_world_size() == 2 else 1e-5
    pair = Pair(adapted(depth=depth), stage, rtol=rtol)
    pair.train(loss_of, 2)
    save_adapters(pair.run, folder)
    dist.barrier()
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(Base(depth), folder)
    for name, value in pair.plain.state_dict().items():
        same(again.state_dict()[name], value, name, rtol)
    merged = again.merge_and_unload()
    x = draw(4, WIDTH)
    with torch.no_grad():
        same(pair.run(x), merged(x), "output", rtol=1e-5)
    names = {path.name for path in Path(folder).iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    with pytest.raises(UnsupportedError, match="Base has no adapters"):
        save_adapters(Base(), folder)


@pytest.mark.parametrize(("num_ranks", "depth"), [(2, 3), (4, 1)])
def test_adapters_are_saved_and_merged(num_ranks: int, depth: int, tmp_path: Path) -> None:
    run_ranks(num_ranks, saved, 3, depth, str(tmp_path), timeout=120)


def merged_in_place(stage: int) -> None:
    """PEFT's own merge edits the shards."""
    pair = Pair(adapted(depth=1), stage)
    pair.train(loss_of, 1)
    x = draw(4, WIDTH)
    with torch.no_grad():
        before = pair.run(x)
        for model in (pair.model, pair.plain):
            model.merge_adapter()
        zerofx.refresh(pair.model)  # PEFT writes to `.data`
        same(pair.run(x), before, "output", rtol=1e-5)
        layer = "base_model.model.layers.0.base_layer.weight"
        ours, theirs = (model.get_parameter(layer) for model in (pair.model, pair.plain))
        same(full(ours), theirs.detach(), layer, rtol=1e-6)
        for model in (pair.model, pair.plain):
            model.unmerge_adapter()
        zerofx.refresh(pair.model)
    pair.rtol = 1e-5
    pair.train(loss_of, [1])


@pytest.mark.parametrize("stage", [2, 3])
def test_merging_in_place(stage: int) -> None:
    run_ranks(2, merged_in_place, stage, timeout=120)


_PROMPTS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
_KINDS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(**_PROMPTS),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**_PROMPTS),
    "p-tuning": lambda: peft.PromptEncoderConfig(**_PROMPTS, encoder_hidden_size=8),
    # Layers share its matrices.
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["layers.0", "layers.1"]),
}


def _plain(kind: str) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "VeRA":
        return Base(2)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def _adapted(kind: str, seed: int = 0) -> Any:
    base = _plain(kind)
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, _KINDS[kind]())
    with torch.no_grad():
        for param in filter(lambda each: each.requires_grad, model.parameters()):
            param.add_(torch.randn_like(param))
    return model.eval()


def _output(run: Any, kind: str) -> Tensor:
    if kind == "VeRA":
        return run(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH))
    return run(input_ids=torch.arange(6)[None]).logits


def saved_and_loaded(kind: str, folder: str) -> None:
    """What PEFT computes from shards, or finds tied, is on disk; and comes back."""
    from zerofx.integrations import save_adapters
    from zerofx.integrations.adapters import load_adapters

    with torch.no_grad():
        wanted = _output(_adapted(kind), kind)
    model, other = _adapted(kind, seed=dist.get_rank()), _adapted(kind, seed=5)
    for each in (model, other):
        zerofx.shard(each, zerofx.ZeroConfig(**EAGER))
    save_adapters(model, folder)
    dist.barrier()
    again = peft.PeftModel.from_pretrained(_plain(kind), folder).eval()
    with torch.no_grad():
        same(_output(again, kind), wanted, "output", rtol=1e-5)
        if kind != "p-tuning":  # PEFT keeps its encoder's results, not the encoder
            assert load_adapters(other, folder)
            run = torch.compile(other, backend="zero3", options=EAGER)
            same(_output(run, kind), wanted, "output", rtol=1e-5)
    with pytest.raises(CheckpointError, match="should be a directory"):
        save_adapters(model, f"{folder}/adapter_config.json")


@pytest.mark.parametrize("kind", _KINDS)
def test_prompts_and_shared_adapters_are_saved(kind: str, tmp_path: Path) -> None:
    run_ranks(2, saved_and_loaded, kind, str(tmp_path), timeout=120)


_COMPUTED = {
    "AdaLoRA": lambda targets: peft.AdaLoraConfig(
        target_modules=targets,
        init_r=4,
        total_step=9,
        rank_pattern={f"{name}.lora_E": [True, False, True, False] for name in targets},
    ),
    "VBLoRA": lambda targets: peft.VBLoRAConfig(
        target_modules=targets, r=2, num_vectors=8, vector_length=8, save_only_topk_weights=True
    ),
}


def saved_as_plain(kind: str, folder: str) -> None:
    from safetensors.torch import load_file

    from zerofx.integrations import save_adapters

    torch.manual_seed(0)
    model = peft.get_peft_model(Base(), _COMPUTED[kind](["layers.0", "layers.1"]))
    plain, ours = f"{folder}/plain{dist.get_rank()}", f"{folder}/ours"
    model.save_pretrained(plain)
    zerofx.shard(model, zerofx.ZeroConfig(**EAGER))
    save_adapters(model, ours)
    dist.barrier()
    wanted, found = (load_file(f"{each}/adapter_model.safetensors") for each in (plain, ours))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same(found[name], value, name)


@pytest.mark.parametrize("kind", _COMPUTED)
def test_what_is_computed_of_adapters_is_saved(kind: str, tmp_path: Path) -> None:
    run_ranks(2, saved_as_plain, kind, str(tmp_path), timeout=120)
