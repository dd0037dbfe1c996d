"""Parameters that are read twice, frozen, unused, tiny, or of mixed kinds."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hard.pair import EAGER, STAGES, Pair, draw, same
from tests.hard.wire import watched
from tests.models import batch, make
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


class Tied(nn.Module):
    """One weight under two names, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(torch.tanh(self.mix(self.embed(ids))))
        return F.cross_entropy(self.head(x), ids)


def _tied(stage: int) -> list[int]:
    """Elements of each message of a backward, largest first."""
    ids = torch.arange(5)
    options = {**EAGER, "bucket_bytes": 0, "memory_budget": 0 if stage == 3 else None}
    pair = Pair(Tied(), stage, options, rtol=1e-6)
    pair.train(lambda run, number: run(ids), 2)
    loss = pair.run(ids)
    with watched() as wire:
        loss.backward()
    return sorted(wire.numels("isend"), reverse=True)


@pytest.mark.parametrize("stage", STAGES)
def test_tied_weights_and_modules_called_twice_send_once(stage: int) -> None:
    first, second = run_ranks(2, _tied, stage)
    if stage == 0:
        assert first == second == [66, 36, 6]
    elif stage < 3:
        # Rank 0 owns six of eleven rows, and sends the gradients of the other five.
        assert first == [30, 18, 3] and second == [36, 18, 3]
    else:
        # Both weights are gathered again, once each; a gather sends a padded chunk.
        assert first == [36, 30, 18, 18, 3] and second == [36, 36, 18, 18, 3]


def _toggled(stage: int) -> None:
    """Frozen parameters are never reduced; freezing and thawing in the middle of a run."""
    pair = Pair(make("frozen"), stage)
    loss = _zoo_loss("frozen")
    frozen = [name for name, param in pair.model.named_parameters() if not param.requires_grad]
    assert frozen
    pair.train(loss, 2)
    for model in (pair.model, pair.plain):
        model.get_parameter("first.weight").requires_grad_(True)
        model.get_parameter("middle.weight").requires_grad_(False)
    pair.train(loss, [2, 3])
    for model in (pair.model, pair.plain):
        model.requires_grad_(True)
    pair.train(loss, [4, 5])
    for model in (pair.model, pair.plain):
        model.requires_grad_(False)
        model.get_parameter("last.bias").requires_grad_(True)
    pair.train(loss, [6, 7])


@pytest.mark.parametrize("stage", [0, 3])
def test_freezing_and_thawing_during_a_run(stage: int) -> None:
    run_ranks(2, _toggled, stage)


def _toggled_between_micro_batches(stage: int) -> None:
    """Of a parameter frozen or thawed in between, the micro-batches that train it count."""
    pair = Pair(make("frozen"), stage, {**EAGER, "accumulate": 3}, rtol=1e-6)
    loss = _zoo_loss("frozen")
    pair.run(*batch("frozen", 0, 0))
    for first, then in ((True, False), (False, True)):
        for number, trains in enumerate((first, then, then)):
            for model in (pair.model, pair.plain):
                model.first.weight.requires_grad_(trains)
                model.middle.bias.requires_grad_(not trains)
            pair.backward(loss, number)
        pair.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_freezing_and_thawing_between_micro_batches(stage: int) -> None:
    run_ranks(2, _toggled_between_micro_batches, stage)


def _zoo_loss(name: str):
    def loss(run: nn.Module, number: int) -> Tensor:
        return run(*batch(name, torch.distributed.get_rank(), number))

    return loss


class Branches(nn.Module):
    """Two layers, of which a step may use either, both or none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 6)
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, sides: str) -> Tensor:
        x = torch.tanh(self.stem(x))
        out = x.sum(1, keepdim=True)
        if "l" in sides:
            out = out + self.left(x)
        if "r" in sides:
            out = out + self.right(x)
        return out.square().mean()


def _sometimes(stage: int) -> None:
    pair = Pair(Branches(), stage)
    turns = ["l", "lr", "r", "", "lr", "l"]
    pair.train(lambda run, number: run(draw(4, 7, seed=number), turns[number]), len(turns))


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_used_on_some_steps_only(stage: int) -> None:
    run_ranks(2, _sometimes, stage)


def _zoo(name: str, stage: int) -> None:
    # Gradients in bf16 are added in fp32 here, in bf16 by all-reduce.
    pair = Pair(make(name), stage, rtol=1e-2 if name == "mixed" else 1e-6)
    pair.train(_zoo_loss(name), 2)


@pytest.mark.parametrize("name", ["thin", "odd", "mixed", "moe"])
@pytest.mark.parametrize("stage", [0, 3])
def test_thin_empty_scalar_mixed_and_unused(name: str, stage: int) -> None:
    run_ranks(2, _zoo, name, stage)


def _assigned(stage: int) -> None:
    """`load_state_dict(assign=True)` where a rank has no rows of several parameters."""
    pair = Pair(make("thin"), stage, rtol=1e-6)
    loss = _zoo_loss("thin")
    pair.train(loss, 1)
    for sharded in (False, True, True):
        halves = {name: value * 0.5 for name, value in pair.plain.state_dict().items()}
        ours = {name: value * 0.5 for name, value in pair.model.state_dict().items()}
        pair.model.load_state_dict(ours if sharded else halves, assign=True)
        pair.plain.load_state_dict(halves)
        pair.optimizer = torch.optim.SGD(pair.model.parameters(), lr=pair.lr)
        pair.train(loss, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_assigning_to_parameters_of_which_a_rank_has_no_rows(stage: int) -> None:
    run_ranks(2, _assigned, stage)


class Returning(nn.Module):
    """Hands its weights out: whole, as views, and through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight = self.linear.weight
        return self.linear(x) * self.scale, weight, weight[1:3].t(), self.scale


def _returned(stage: int) -> None:
    pair = Pair(Returning(), stage)
    ours, theirs = pair.run(draw(3, 6)), pair.plain(draw(3, 6))
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        same(one.detach(), other.detach(), f"output {index}")
    kept = [value.detach().clone() for value in ours]
    for outputs in (ours, theirs):
        sum(value.square().sum() for value in outputs).backward()
    pair.step()
    # The outputs are values: what happens to the weights afterwards does not reach them.
    with torch.no_grad():
        pair.run(draw(3, 6))
    for index, (one, other) in enumerate(zip(ours, kept, strict=True)):
        same(one.detach(), other, f"kept output {index}")
    # As values they do not carry an edit to the weights: it is refused, and the model lives on.
    with torch.no_grad():
        pair.run(draw(3, 6))[1].zero_()
        with pytest.raises(UnsupportedError, match=r"linear\.weight"):
            pair.run(draw(3, 6))
        same(pair.run(draw(3, 6))[1], pair.plain(draw(3, 6))[1], "weight after an edited copy")


@pytest.mark.parametrize("stage", [1, 3])
def test_returned_weights_are_copies(stage: int) -> None:
    run_ranks(2, _returned, stage)


class Penalised(nn.Module):
    """Adds penalties over `self.parameters()` inside the captured forward, one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make("mlp")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        penalty = sum(param.square().sum() for param in self.parameters())
        added, means = torch.zeros(()), torch.zeros(9)
        for place, param in enumerate(self.parameters()):
            added += param.norm()
            means[place] = param.abs().mean()
        return self.layers(x, y) + 0.01 * (penalty + added + means.square().sum())


def _penalty_inside(stage: int) -> None:
    pair = Pair(Penalised(), stage, rtol=1e-5)
    pair.train(_zoo_loss("mlp"), 2)


def _penalty_outside(stage: int) -> None:
    pair = Pair(make("mlp"), stage, rtol=1e-5)
    of_model = {id(pair.run): pair.model, id(pair.plain): pair.plain}

    def loss(run: nn.Module, number: int) -> Tensor:
        base = run(*batch("mlp", torch.distributed.get_rank(), number))
        penalty = sum(full_sum(param) for param in of_model[id(run)].parameters())
        return base + 0.01 * penalty

    def full_sum(param: Tensor) -> Tensor:
        total = param.square().sum()
        return total.full_tensor() if hasattr(total, "full_tensor") else total

    pair.train(loss, 3)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("job", [_penalty_inside, _penalty_outside])
def test_l2_penalty_over_parameters(job: object, stage: int) -> None:
    run_ranks(2, job, stage)  # pyright: ignore[reportArgumentType]


class Learner(nn.Module):
    """As MAML's: what `parameters` takes and gives is the model's own affair, and its layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(draw(5, 4, seed=7)), nn.Parameter(draw(5))])
        self.scales = Scales()

    def forward(self, x: Tensor) -> Tensor:
        return self.scales(F.linear(x, self.vars[0], self.vars[1])).square().mean()

    def parameters(self) -> nn.ParameterList:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.vars


class Scales(nn.Module):
    """A layer with `named_parameters` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def named_parameters(self) -> dict[str, nn.Parameter]:  # pyright: ignore
        return {"gain": self.scale}


def _learns() -> None:
    model = Learner()
    run = torch.compile(model, backend="zero3", options=EAGER)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        losses.append(run(draw(3, 4)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[1] < losses[0]
    again = torch.compile(copy.deepcopy(model), backend="zero3", options=EAGER)
    assert torch.equal(again(draw(3, 4)), run(draw(3, 4)))


def test_parameters_by_a_method_of_the_models_own() -> None:
    run_ranks(2, _learns)
