"""LoRA of parameters that no layer holds: experts that are one tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.hard.pair import Pair, draw, same
from tests.integrations.test_peft import RANK, WIDTH, loss_of
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError

peft = pytest.importorskip("peft")


class Experts(nn.Module):
    """Two parameters of one module, which PEFT wraps one around the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.up = nn.Parameter(torch.randn(3, WIDTH, 5))
        self.down = nn.Parameter(torch.randn(3, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(torch.einsum("nd,edh->enh", x, self.up))
        return torch.einsum("enh,ehd,ne->nd", inner, self.down, self.gate(x).softmax(-1))


def experts_of_one_tensor() -> None:
    from zerofx.integrations import trace_target_parameters

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=RANK, target_parameters=["0.up", "0.down"], target_modules=[], init_lora_weights=False
    )
    model = peft.get_peft_model(nn.Sequential(Experts()), config)
    x, names = draw(4, WIDTH), set(model.state_dict())
    wanted = copy.deepcopy(model)(x).detach()
    pair = Pair(model, 3)
    with pytest.raises(UnsupportedError, match="trace_target_parameters"):
        pair.run(x)
    for each in (pair.model, pair.plain):
        trace_target_parameters(each)
    assert set(pair.model.state_dict()) == names
    same(pair.run(x).detach(), wanted, "output", rtol=1e-5)
    pair.train(loss_of, 3)


def test_experts_that_are_one_tensor() -> None:
    run_ranks(2, experts_of_one_tensor, timeout=120)
