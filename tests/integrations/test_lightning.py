"""Lightning over zerofx, beside Lightning over DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.checkpoint.runs import full
from tests.ranks import run_ranks
from zerofx import ZeroConfig, checkpoint
from zerofx.errors import ConfigError, UnsupportedError

lightning = pytest.importorskip("lightning.pytorch")

OPTIONS: dict[str, Any] = {"inner": "eager", "min_shard_numel": 0}


class Module(lightning.LightningModule):
    """Calls a child and itself; drops out, so that random states matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.net(x)))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        (x,) = batch
        loss = (self(x) - x.sum(1, keepdim=True)).square().mean() + self.net(x).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("far", self(batch[0]).abs().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Two(Module):
    """Steps by two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        net, last = self.net.parameters(), self.last.parameters()
        return torch.optim.AdamW(net, lr=0.05), torch.optim.SGD(last, lr=0.1, momentum=0.9)


def data() -> DataLoader[Any]:
    rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows), batch_size=2)


def fit(
    folder: str,
    stage: int | None,
    epochs: int,
    resume: str | None = None,
    build: type[Module] = Module,
) -> Any:
    from zerofx.integrations import ZeroStrategy

    plain = stage is None
    strategy: Any = "ddp" if plain else ZeroStrategy(ZeroConfig(stage=stage, **OPTIONS))  # pyright: ignore
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2 if build is Module else 1,
        gradient_clip_val=0.5 if build is Module else None,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = build()
    trainer.fit(module, data(), data(), ckpt_path=resume)
    path = trainer.checkpoint_callback.best_model_path
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return [full(param) for param in module.parameters()], metrics, path, trainer.global_step


def _trains(folder: str, stage: int) -> None:
    plain, wanted, _, _ = fit(f"{folder}/ddp", None, 2)
    params, metrics, _, steps = fit(f"{folder}/zero", stage, 2)
    assert steps == 6 and metrics == pytest.approx(wanted, rel=1e-5)
    for got, want in zip(params, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_trains_as_over_ddp(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _trains, str(tmp_path), stage, timeout=120)


def _resumes(folder: str) -> None:
    wanted, metrics, _, _ = fit(f"{folder}/whole", 2, 3)
    values, _, path, _ = fit(f"{folder}/first", 2, 2)
    module = Module()
    checkpoint.load(path, module)
    for got, want in zip(module.parameters(), values, strict=True):
        assert torch.equal(got, want)
    params, again, _, steps = fit(f"{folder}/rest", 3, 3, path)
    assert steps == 9 and again == metrics
    assert all(torch.equal(got, want) for got, want in zip(params, wanted, strict=True))


def test_resumes_bitwise_at_another_stage(tmp_path: Path) -> None:
    run_ranks(2, _resumes, str(tmp_path), timeout=120)


def _two(folder: str) -> None:
    plain, wanted, _, _ = fit(f"{folder}/ddp", None, 2, build=Two)
    _, _, path, _ = fit(f"{folder}/first", 3, 1, build=Two)
    params, metrics, _, _ = fit(f"{folder}/rest", 1, 2, path, Two)
    assert metrics == pytest.approx(wanted, rel=1e-5)
    for got, want in zip(params, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_two_optimizers_train_and_resume(tmp_path: Path) -> None:
    run_ranks(2, _two, str(tmp_path), timeout=120)


def _weights_only(folder: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    from zerofx.integrations import ZeroStrategy

    saver = lightning.callbacks.ModelCheckpoint(folder, "weights", save_weights_only=True)

    def trainer() -> Any:
        return lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ZeroStrategy(ZeroConfig(stage=3, **OPTIONS)),
            callbacks=[saver],
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
        )

    module = Module()
    first = trainer()
    first.fit(module, data(), data())
    names = FileSystemReader(saver.best_model_path).read_metadata().state_dict_metadata
    assert "model.last.weight" in names and not any(each.startswith("optimizer") for each in names)
    again = trainer().validate(Module(), data(), ckpt_path=saver.best_model_path)
    assert again[0]["far"] == pytest.approx(first.callback_metrics["far"].item())
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        trainer().fit(Module(), data(), ckpt_path=saver.best_model_path)


def test_weights_alone_are_saved(tmp_path: Path) -> None:
    run_ranks(2, _weights_only, str(tmp_path), timeout=120)


class Normed(Module):
    """Has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


_REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "averages": (
        Module,
        {"callbacks": [lightning.callbacks.StochasticWeightAveraging(swa_lrs=0.1)]},
        r"StochasticWeightAveraging[\s\S]*on_fit_start",
    ),
    "written elsewhere": (
        Module,
        {"plugins": [lightning.plugins.io.AsyncCheckpointIO()]},
        r"checkpoint_io is a AsyncCheckpointIO[\s\S]*async_save",
    ),
    "synced": (
        Normed,
        {"sync_batchnorm": True},
        r"sync_batchnorm=True[\s\S]*- norm\n[\s\S]*GroupNorm",
    ),
}


def _refuses(folder: str, build: type[Module], given: dict[str, Any], said: str) -> None:
    from zerofx.integrations import ZeroStrategy

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeroStrategy(ZeroConfig(stage=3, **OPTIONS)),
        default_root_dir=folder,
        logger=False,
        **given,
    )
    with pytest.raises(UnsupportedError, match=said):
        trainer.fit(build(), data())


@pytest.mark.parametrize("case", _REFUSED)
def test_what_the_strategy_does_not_do_is_refused(case: str, tmp_path: Path) -> None:
    run_ranks(2, _refuses, str(tmp_path), *_REFUSED[case])


@pytest.mark.parametrize(
    "name", ["ddp_comm_hook", "static_graph", "gradient_as_bucket_view", "find_unused_parameters"]
)
def test_what_only_ddp_does_is_refused(name: str) -> None:
    from zerofx.integrations import ZeroStrategy

    given: dict[str, Any] = {name: True}
    with pytest.raises(ConfigError, match=name):
        ZeroStrategy(**given)
    ZeroStrategy(process_group_backend="gloo")
