"""`backend="zero"` and options of `zerofx.shard`, where a model is met in unusual ways."""

from __future__ import annotations

import torch
from torch import nn

import zerofx
from tests.contract.loops import FAST, config
from tests.hard.pair import draw
from tests.ranks import run_ranks


def _evaluated_first() -> list[bool]:
    found = []
    for quiet in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9))
        run = torch.compile(model, backend="zero", options=FAST)
        with quiet():
            run(draw(4, 7))
        run(draw(4, 7)).square().sum().backward()
        found.append(all(param.grad is not None for param in model.parameters()))
        # It says when forwards begin: buffers are sent then, and not inside of one.
        found.append(len(run._forward_pre_hooks) == 1)
    return found


def test_a_first_forward_without_gradients() -> None:
    assert run_ranks(2, _evaluated_first) == [[True] * 4] * 2


def _grown() -> list[str]:
    model = zerofx.shard(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)), config(3))
    run = torch.compile(model, backend="zero3")
    run(draw(4, 7)).sum().backward()
    model.append(nn.Linear(7, 7))
    run(draw(4, 7)).sum().backward()
    return [name for name, param in model.named_parameters() if param.grad is not None]


def test_parameters_added_to_a_model_that_zerofx_shard_was_given() -> None:
    names = [f"{number}.{kind}" for number in range(3) for kind in ("weight", "bias")]
    assert run_ranks(2, _grown) == [names] * 2
