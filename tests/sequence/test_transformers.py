"""A model of transformers, whose positions, mask and loss are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.ranks import run_ranks

VOCABULARY, LENGTH = 37, 16


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _batch(step: int, *, pads: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
    found = {"input_ids": ids, "labels": ids.clone()}
    found["labels"][1, :12] = -100
    if pads:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][2, -5:] = 0
        found["labels"][2, -5:] = -100
    return found


def _steps(run: Any, model: nn.Module, *, pads: bool) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
    for step in range(2):
        batch = {name: x.clone() for name, x in _batch(step, pads=pads).items()}
        zerofx.mark_sequence(batch["input_ids"])
        loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _trained(pads: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = _model()
    options = {"inner": "eager", "min_shard_numel": 0, "sequence_parallel": dist.get_world_size()}
    run = torch.compile(model, backend="zero3", options=options)
    losses = _steps(run, model, pads=pads)
    with zerofx.unshard(model) as values:
        return losses, {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize("pads", [False, True])
def test_llama(pads: bool) -> None:
    pytest.importorskip("transformers")
    model = _model()
    want = _steps(model, model, pads=pads)
    for losses, values in run_ranks(2, _trained, pads, timeout=120):
        assert losses == pytest.approx(want, rel=1e-5)
        for name, param in model.named_parameters():
            torch.testing.assert_close(values[name], param.detach(), rtol=1e-4, atol=1e-5)
