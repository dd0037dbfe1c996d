"""`resize_token_embeddings` of a model that is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import zerofx
from tests.ranks import run_ranks
from zerofx.integrations import resize_token_embeddings

transformers = pytest.importorskip("transformers")


class Small(transformers.PreTrainedModel):
    """What resizing looks for in a model, and one layer: a Llama takes long to trace."""

    config_class = transformers.PretrainedConfig
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, 32)
        self.layer = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(torch.tanh(self.layer(self.embed_tokens(input_ids))))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss, logits)


def _small(tied: bool) -> Any:
    torch.manual_seed(0)
    return Small(transformers.PretrainedConfig(vocab_size=64, tie_word_embeddings=tied))


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


def _resized(build: Any, stage: int, tied: bool, used: bool) -> None:
    options: Any = {"inner": "eager", "min_shard_numel": 0}
    model, plain = build(tied), build(tied)
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
    ("build", "stage", "tied", "used"),
    [(_llama, 1, True, False), (_small, 2, False, True), (_small, 3, True, True)],
)
def test_resized_after_sharding(build: Any, stage: int, tied: bool, used: bool) -> None:
    run_ranks(2, _resized, build, stage, tied, used)


def _continued(stage: int) -> None:
    """An optimizer from before trains the resized embeddings, as it does over one process."""
    options: Any = {"inner": "eager", "min_shard_numel": 0}
    model, plain = _small(True), _small(True)
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
