"""`resize_token_embeddings` of a model that is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import zerofx
from tests.ranks import run_ranks
from zerofx.integrations import resize_token_embeddings

transformers = pytest.importorskip("transformers")


def _llama(tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def _losses(run: Any, model: Any, steps: int) -> list[float]:
    optimizer = SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(54, 70).reshape(2, 8)  # the last of them are new
    losses: list[float] = []
    for _ in range(steps):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _resized(stage: int, tied: bool, used: bool) -> None:
    options: Any = {"inner": "eager", "min_shard_numel": 0}
    model, plain = _llama(tied), _llama(tied)
    zerofx.shard(model, zerofx.ZeroConfig(stage=stage, **options))
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    if used:
        run(input_ids=torch.zeros(2, 8, dtype=torch.int64))
    torch.manual_seed(1 + dist.get_rank())  # rank 0's new rows win
    resize_token_embeddings(run, 70, mean_resizing=False)
    torch.manual_seed(1)
    plain.resize_token_embeddings(70, mean_resizing=False)
    torch.testing.assert_close(
        _losses(run, model, 3), _losses(DistributedDataParallel(plain), plain, 3)
    )
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert isinstance(embedding, DTensor) and embedding.shape == head.shape == (70, 32)
    assert (head is embedding) == tied


@pytest.mark.parametrize(
    ("stage", "tied", "used"), [(1, True, False), (2, False, True), (3, True, True)]
)
def test_resized_after_sharding(stage: int, tied: bool, used: bool) -> None:
    run_ranks(2, _resized, stage, tied, used)


def _continued(stage: int) -> None:
    """An optimizer from before trains the resized embeddings, as it does over one process."""
    options: Any = {"inner": "eager", "min_shard_numel": 0}
    model, plain = _llama(True), _llama(True)
    optimizers = [SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    run: Any = torch.compile(model, backend=f"zero{stage}", options=options)
    resize: Any = (resize_token_embeddings, type(plain).resize_token_embeddings)
    tokens = torch.arange(40, 56).reshape(2, 8)
    losses: list[list[float]] = [[], []]
    for step in range(4):
        if step == 1:
            for each, enlarge in zip((run, plain), resize, strict=True):
                torch.manual_seed(1)
                enlarge(each, 70, mean_resizing=False)
        for number, each in enumerate((run, plain)):
            loss = each(input_ids=tokens, labels=tokens).loss
            loss.backward()
            if step == 1 and number:  # momentum of the old shape, which zerofx drops
                optimizers[1].state.pop(plain.get_input_embeddings().weight, None)
            optimizers[number].step()
            optimizers[number].zero_grad()
            losses[number].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_go_on_with_resized_embeddings(stage: int) -> None:
    run_ranks(1, _continued, stage)  # where a plain optimizer may step beside it
