"""transformers' `generate` on a sharded model: ranks stop at different lengths and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import zerofx
from benchmarks.meters import peak_bytes
from tests.checkpoint.runs import sharded_by
from tests.ranks import run_ranks

LENGTH = 8


def _llama() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 150, "vocab_size": 97}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))  # pyright: ignore[reportArgumentType]


def _gpt2() -> Any:
    sizes = {"n_embd": 64, "n_head": 2, "n_layer": 4, "vocab_size": 97, "n_positions": 64}
    # Small weights would say the same token again and again.
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.5))  # pyright: ignore


def _model(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build().eval()


def _prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (1, 5), generator=generator) for _ in range(2)]


def _tokens(model: Any, prompt: Tensor, sample: bool, eos: int | None = None) -> list[int]:
    torch.manual_seed(7)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=LENGTH,
        do_sample=sample,
        eos_token_id=eos,
        pad_token_id=0,
        synced_gpus=dist.get_world_size() > 1,
    )
    return out[0, prompt.shape[1] :].tolist()


def _alone(build: Callable[[], Any], sample: bool) -> tuple[int, list[list[int]]]:
    """A token that ends the first sequence early, and what a single process says with it."""
    model = _model(build)
    free = [_tokens(model, prompt, sample) for prompt in _prompts()]
    eos = next(token for token in free[0] if token not in free[1])
    return eos, [_tokens(model, prompt, sample, eos) for prompt in _prompts()]


def _together(build: Callable[[], Any], sample: bool, eos: int) -> tuple[list[int], int, int]:
    model = _model(build)
    zerofx.shard(model, sharded_by(3, min_shard_numel=512))
    found: list[int] = []

    def speak(mark: Callable[[], None]) -> None:
        torch.zeros(1)
        mark()
        found.extend(_tokens(model, _prompts()[dist.get_rank()], sample, eos))

    peak, start = peak_bytes(speak)
    everything = sum(param.numel() * 4 for param in model.parameters())
    return found, peak - start, everything


@pytest.mark.parametrize(("build", "sample"), [(_llama, False), (_llama, True), (_gpt2, True)])
def test_generate_equals_a_single_process(build: Callable[[], Any], sample: bool) -> None:
    ((eos, wanted),) = run_ranks(1, _alone, build, sample, timeout=120)
    assert len(wanted[0]) != len(wanted[1]), "both stop together: the test shows nothing"
    results = run_ranks(2, _together, build, sample, eos, timeout=120)
    for (tokens, added, everything), want in zip(results, wanted, strict=True):
        assert tokens[: len(want)] == want
        assert added < everything / 3, "the model was gathered whole"
