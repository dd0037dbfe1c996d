"""Accelerate's loop over zerofx, beside the same loop over DistributedDataParallel."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("accelerate")

import zerofx.integrations
from tests.checkpoint.runs import bitwise, full
from tests.integrations.loops import Loop, Net, config_of, fresh_state, resumed, trained
from tests.ranks import run_ranks
from zerofx import ZeroConfig
from zerofx.errors import ConfigError, MissingPackageError, ShardingError, UnsupportedError


@pytest.mark.parametrize(("num_ranks", "stages"), [(2, (0, 1, 3)), (4, (3,))])
def test_trains_as_over_ddp(num_ranks: int, stages: tuple[int, ...]) -> None:
    """Accumulation, clipping, schedule and metrics; the prepared model is the model itself."""
    wanted = run_ranks(num_ranks, trained, None, gradient_accumulation_steps=2, timeout=200)
    for stage in stages:
        found = run_ranks(num_ranks, trained, stage, gradient_accumulation_steps=2, timeout=200)
        for got, want in zip(found, wanted, strict=True):
            assert got[0] == pytest.approx(want[0], rel=1e-5)
            for name, value in got[1].items():
                torch.testing.assert_close(value, want[1][name], rtol=1e-5, atol=1e-6)
            assert got[2][0] == want[2][0] == 44
            torch.testing.assert_close(got[2][1], want[2][1])
            assert (got[3], want[3]) == ("Net", "DistributedDataParallel")


@pytest.mark.parametrize(("stage", "again"), [(1, 1), (2, 3)])
def test_resumes_bitwise(stage: int, again: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    for got, want, values, others, files in run_ranks(
        2, resumed, stage, folder, again, timeout=200
    ):
        assert got == want
        bitwise(values, others)
        assert files == ["random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "zerofx_0"]


def two_optimizers(folder: str) -> None:
    from zerofx.integrations import Accelerator

    fresh_state()
    accelerator, net = Accelerator(config_of(3), cpu=True), Net()
    first, rest = net.layers[0].parameters(), net.layers[1:].parameters()
    pair = torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9)
    model, *optimizers = accelerator.prepare(net, *pair)

    def step() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with accelerator.join_uneven_inputs([model]):
            accelerator.backward(model(torch.randn(4, 7)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return {name: full(value).clone() for name, value in model.state_dict().items()}

    before = step()
    accelerator.save_state(folder)
    after = step()
    accelerator.load_state(folder)
    bitwise(model.state_dict(), before)
    bitwise(step(), after)


def test_two_optimizers_of_a_model_resume(tmp_path: Path) -> None:
    run_ranks(2, two_optimizers, str(tmp_path / "state"), timeout=200)


def two_models(folder: str) -> list[str]:
    """Of one optimizer, and a third one with its own."""
    from zerofx.integrations import Accelerator

    fresh_state()
    accelerator, nets = Accelerator(config_of(3), cpu=True), [Net() for _ in range(3)]
    pair = [*nets[0].parameters(), *nets[2].parameters()], nets[1].parameters()
    *models, first, second = accelerator.prepare(
        *nets, *(torch.optim.AdamW(each, lr=0.01) for each in pair)
    )

    def step() -> list[dict[str, torch.Tensor]]:
        losses = [model(torch.ones(4, 7)).square().mean() for model in models]
        accelerator.backward(torch.stack(losses).sum())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        states = [model.state_dict() for model in models]
        return [{name: full(each).clone() for name, each in state.items()} for state in states]

    before = step()
    accelerator.save_state(folder)
    after = step()
    accelerator.load_state(folder)
    for model, values in zip(models, before, strict=True):
        bitwise(model.state_dict(), values)
    for got, want in zip(step(), after, strict=True):
        bitwise(got, want)
    return sorted(path.name for path in Path(folder).glob("zerofx_*"))


def test_models_of_one_optimizer_resume(tmp_path: Path) -> None:
    found = run_ranks(2, two_models, str(tmp_path / "state"), timeout=200)
    assert found == [["zerofx_0", "zerofx_1"]] * 2


def in_low_precision() -> torch.dtype:
    """Accelerate's own autocast is inside the compiled forward; outputs are fp32 again."""
    loop = Loop(3, mixed_precision="bf16")
    seen = []
    loop.model.layers[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    out = loop.model(torch.randn(4, 7))
    loop.accelerator.backward(out.sum())
    loop.optimizer.step()
    assert out.dtype is torch.float32
    return seen[0]


def test_mixed_precision_is_accelerates() -> None:
    assert run_ranks(2, in_low_precision, timeout=200) == [torch.bfloat16] * 2


def saved(folder: str) -> None:
    """`save_model` writes full values, once; rows are no such."""
    from safetensors.torch import save_file

    loop = Loop(3)
    with pytest.raises(UnsupportedError, match=r"export_safetensors[\s\S]*full_state_dict"):
        save_file(loop.model.state_dict(), Path(folder, "rows"))
    loop.accelerator.save_model(loop.model, folder)
    loop.accelerator.wait_for_everyone()
    plain = Net()
    plain.load_state_dict(_read(folder))
    bitwise(plain.state_dict(), dict(loop.values()))
    loop.accelerator.register_for_checkpointing(copy.deepcopy(loop.model))
    with pytest.raises(UnsupportedError, match=r"Net\.layers\.0\.weight[\s\S]*to prepare"):
        loop.accelerator.save_state(folder)


def _read(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder, "model.safetensors"))


def test_full_weights_are_saved(tmp_path: Path) -> None:
    run_ranks(2, saved, str(tmp_path), timeout=200)


def refusals() -> None:
    import accelerate

    from zerofx.integrations import Accelerator

    fresh_state()
    with pytest.raises(ConfigError, match="accumulate=2"):
        Accelerator(ZeroConfig(accumulate=2), cpu=True).prepare(Net())
    fresh_state()
    if not torch.cuda.is_available():
        with pytest.raises(
            ConfigError, match=r"counts one process, where 2 ranks[^.]*use_cpu=True"
        ):
            accelerate.PartialState()  # as TrainingArguments makes it without use_cpu
            Accelerator(config_of(3))
        fresh_state()
        assert Accelerator(config_of(3)).num_processes == 2
        fresh_state()
    with pytest.raises(ConfigError, match="dynamo_backend"):
        Accelerator(cpu=True, dynamo_backend="eager")
    fresh_state()
    accelerator = Accelerator(config_of(3), cpu=True)
    with (
        pytest.raises(ConfigError, match="even_batches=False"),
        accelerator.join_uneven_inputs([], even_batches=False),
    ):
        pass
    uneven = accelerate.DataLoaderConfiguration(even_batches=False)
    with pytest.raises(ConfigError, match="even_batches=False"):
        Accelerator(config_of(3), cpu=True, dataloader_config=uneven)
    with pytest.raises(UnsupportedError, match="wrapped in DistributedDataParallel"):
        accelerator.prepare(DistributedDataParallel(Net()))
    model = zerofx.shard(Net(), config_of(2))
    with pytest.raises(ShardingError, match="other options"):
        accelerator.prepare(model)
    alone = accelerate.Accelerator(cpu=True).prepare(torch.compile(Net(), backend="zero3"))
    assert isinstance(alone, DistributedDataParallel)
    with pytest.raises(UnsupportedError, match=r"zerofx\.integrations\.Accelerator"):
        alone(torch.randn(4, 7))


def test_nothing_is_wrapped_twice() -> None:
    run_ranks(2, refusals, timeout=200)


class Broken(torch.nn.Module):
    """What comes before the first layer is a graph without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin() * 2
        torch._dynamo.graph_break()
        return self.layer(x)


def uses_no_inductor() -> None:
    from zerofx.integrations import Accelerator

    def never(*_: object) -> None:
        raise AssertionError("Inductor compiles")

    fresh_state()
    model = Accelerator(config_of(3), cpu=True).prepare(Broken())
    with patch("zerofx.frontend.inner.compile_with_inductor", never):
        model(torch.randn(4, 7, requires_grad=True)).sum().backward()


def test_options_hold_for_graphs_without_parameters() -> None:
    run_ranks(2, uses_no_inductor)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "zerofx.integrations.accelerator", raising=False)
    with pytest.raises(MissingPackageError, match=r"accelerate, which[\s\S]*zerofx\[hf\]"):
        _ = zerofx.integrations.Accelerator
