"""`Accelerator`: Accelerate's own, whose models zerofx shards and compiles instead of wrapping."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zerofx
from zerofx.checkpoint.rows import rows_in
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.recipe_accelerator import RecipeAccelerator
from zerofx.integrations.rivals import keeps_buffers, refuse_rivals, told_by
from zerofx.runtime.in_place import full
from zerofx.runtime.params import params_of
from zerofx.sharding.refuse import refuse_wrappers
from zerofx.sharding.shard import session_of
from zerofx.torch_private import unwrap_compiled

_FOLDER = "zerofx_{}"


class Accelerator(RecipeAccelerator):
    """`accelerate.Accelerator` over zerofx: the loop is Accelerate's, word for word.

    `prepare` shards models in place and compiles them in place, so that a prepared model is the
    model itself: nothing wraps it, and `unwrap_model` returns it.

    Args:
        zero: stage and options of every prepared model; by default stage 3, or those of a model
            that is sharded already. Or what `zerofx.from_deepspeed` returns: models are cast,
            divided and routed, ranks take samples, and steps are taken, as its file says.
        compile_kwargs: for `nn.Module.compile`: `dynamic`, `fullgraph`, `mode`.
        layer: class of the layers that the file's `random_ltd` routes; by default the one that a
            model of transformers names.
        scaler: scales losses, as `zerofx.GradScaler` does; by default the file's, else Accelerate's
            own, if `mixed_precision` is `fp16`.
        kwargs: those of `accelerate.Accelerator`; `cpu` is true by default where there is no GPU.

    Raises:
        ConfigError: another library is to distribute or compile, too; names the option. Or
            Accelerate counts one process where there are several, or ranks are to have different
            numbers of batches, or the file contradicts it.
    """

    def __init__(
        self,
        zero: ZeroConfig | Recipe | None = None,
        *,
        compile_kwargs: Mapping[str, Any] | None = None,
        layer: type[nn.Module] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        # Without being told so, Accelerate takes ranks on CPUs for processes that are alone.
        kwargs.setdefault("cpu", not torch.accelerator.is_available())
        config, recipe = told_by(zero)
        super().__init__(recipe, layer, scaler, **kwargs)
        self._zero = config
        self._compile_kwargs = dict(compile_kwargs or {})
        refuse_rivals(self)
        self._refuse_counting_alone()
        if self.num_processes > 1:
            _refuse_uneven(self.even_batches)
        if recipe is not None:
            self._zero = dataclasses.replace(recipe.config, accumulate=1)  # Accelerate counts

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place, shard and compile a model; the same object comes back.

        Args:
            model: plain, on the meta device, or sharded or compiled with zerofx already.
            device_placement: as for Accelerate.
            evaluation_mode: makes no difference: a model that is only evaluated is sharded, too.

        Raises:
            UnsupportedError: DistributedDataParallel or FSDP wraps it.
            ConfigError: its options count micro-batches, which Accelerate does; or it is sharded
                already, and was not cast or divided before as the file says.
        """
        plain = unwrap_compiled(model)
        refuse_wrappers(plain.modules())
        if any(param.is_meta for param in plain.parameters()):
            device_placement = False  # zerofx makes the values where they belong
        # "For evaluation" is Accelerate's way to say: mixed precision, but no wrapper.
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        session = session_of(plain)
        self.change(plain, sharded=session is not None)
        wanted = self._zero
        if keeps_buffers(self):
            found = ZeroConfig() if session is None else session.config
            wanted = dataclasses.replace(wanted or found, broadcast_buffers=False)
        if session is None or wanted is not None:
            zerofx.shard(plain, wanted)
            session = session_of(plain)
        if session is not None and session.config.accumulate != 1:
            raise ConfigError(
                f"ZeroConfig(accumulate={session.config.accumulate}) counts backwards, and so does "
                "Accelerate",
                "use Accelerator(gradient_accumulation_steps=…), and accelerator.accumulate(model)",
            )
        if session is not None and model is plain and plain._compiled_call_impl is None:
            plain.compile(backend=f"zero{session.config.stage}", **self._compile_kwargs)
        return model

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate without exchanging gradients, where that saves bytes; see `zerofx.no_sync`."""
        with zerofx.no_sync(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Nothing: ranks have as many batches, as `even_batches` sees to.

        Raises:
            ConfigError: it is false, here or for this Accelerator.
        """
        _refuse_uneven(self.even_batches if even_batches is None else even_batches)
        yield

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: int = 2
    ) -> Tensor | None:
        """Clip, and return the norm over all ranks: a plain tensor of no dimensions."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return full(norm)

    def save_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything; every rank calls it, and writes the rows that it owns.

        Accelerate writes schedulers, samplers, random states and registered objects. Models and
        optimizers follow in folders `zerofx_0`, … of `torch.distributed.checkpoint`, or in one for
        each part of a model below; models of one optimizer share a folder, as an `nn.ModuleList`.
        Hooks of `register_save_state_pre_hook` get no models.

        Args:
            output_dir: the folder; by default as the project's configuration numbers them.
            safe_serialization: makes no difference: tensors are never pickled.
            save_model_func_kwargs: passed on.

        Returns:
            The folder.

        Raises:
            CheckpointError: a rank could not write.
            UnsupportedError: a registered object has rows of sharded tensors, of which Accelerate
                would write rank 0's; names them.
        """
        _refuse_rows(self._custom_objects)
        with self._set_aside() as pairs:
            folder = str(
                super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
            )
        for number, (model, its) in enumerate(pairs):
            self.save_shards(Path(folder) / _FOLDER.format(number), model, its)
        return folder

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` saved, on any number of ranks and at any stage.

        Args:
            input_dir: the folder; by default the latest of the project.
            load_kwargs: passed on, for what Accelerate itself wrote.
            load_model_func_kwargs: passed on.

        Raises:
            CheckpointError: something is missing, damaged or of another model.
        """
        with self._set_aside() as pairs:

            def read(_: list[nn.Module], folder: str) -> None:
                for number, (model, its) in enumerate(pairs):
                    self.load_shards(Path(folder) / _FOLDER.format(number), model, its)

            hook = self.register_load_state_pre_hook(read)
            try:
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            finally:
                hook.remove()

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[list[tuple[nn.Module, list[Optimizer]]]]:
        """Each model with its optimizers, which Accelerate does not see meanwhile.

        Models that an optimizer trains together are one.
        """
        models, optimizers = self._models, self._optimizers
        joined = _joined_by_optimizers(models, optimizers)
        pairs = [(model, _optimizers_of(model, optimizers)) for model in joined]
        self._models, self._optimizers = [], []
        try:
            yield pairs
        finally:
            self._models, self._optimizers = models, optimizers

    def _refuse_counting_alone(self) -> None:
        """Whoever made Accelerate's state first may not have said `cpu`: `TrainingArguments`."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1 and self.num_processes == 1:
            raise ConfigError(
                f"Accelerate counts one process, where {ranks} ranks train together: each of them "
                "would go over all of the data",
                "on CPUs use TrainingArguments(use_cpu=True), or Accelerator(cpu=True)",
            )


def _refuse_rows(registered: list[Any]) -> None:
    states = [(type(each).__name__, each.state_dict()) for each in registered]
    if found := [name for kind, state in states for name in rows_in(state, kind)]:
        raise UnsupportedError(
            "objects of register_for_checkpointing have sharded tensors, and Accelerate writes "
            "rank 0's rows of them",
            "give copies of a model to prepare, too, instead of registering them; else have "
            "state_dict() make values whole: value.full_tensor()",
            found,
        )


def _refuse_uneven(even_batches: bool) -> None:
    if not even_batches:
        raise ConfigError(
            "even_batches=False: a rank whose batches are over first leaves the others waiting",
            "leave it true; samples that ranks share then are there once in gather_for_metrics",
        )


def _joined_by_optimizers(models: list[nn.Module], optimizers: list[Any]) -> list[nn.Module]:
    """The models, those with an optimizer in common in a list that is a module, at the first's."""
    parts = [[model] for model in models]
    for each in optimizers:
        held = {id(param) for param in params_of(each)}
        trained = [
            part
            for part in parts
            if any(id(param) in held for model in part for param in model.parameters())
        ]
        for other in trained[1:]:
            trained[0] += other
            parts.remove(other)
    return [part[0] if len(part) == 1 else nn.ModuleList(part) for part in parts]


def _optimizers_of(model: nn.Module, optimizers: list[Any]) -> list[Optimizer]:
    """Those of the model's parameters, without Accelerate's wrappers."""
    mine = {id(param) for param in model.parameters()}
    return [
        each.optimizer for each in optimizers if any(id(param) in mine for param in params_of(each))
    ]
