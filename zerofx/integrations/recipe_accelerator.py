"""`RecipeAccelerator`: Accelerate's own, whose data, steps and checkpoints are those of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from zerofx import checkpoint
from zerofx.checkpoint.store import Optimizers
from zerofx.errors import CheckpointError, ConfigError
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.routing import TokenRouter, is_routed
from zerofx.integrations.deepspeed.schedules import Schedule
from zerofx.integrations.recipe import layer_of, refuse_contradictions
from zerofx.integrations.samples import deals, gather_once, shared_loader
from zerofx.integrations.stepping import GroupScheduler, RecipeOptimizer
from zerofx.integrations.tensor_parallel.export import joined_state_dict
from zerofx.integrations.tensor_parallel.parts import TensorParallel


class RecipeAccelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, as it is or as a file of DeepSpeed has it.

    Args:
        recipe: what the file asks for, if there is one.
        layer: class of the layers that `random_ltd` routes; by default the model's own word.
        scaler: scales losses; by default the file's, else Accelerate's own.
        kwargs: those of `accelerate.Accelerator`.

    Attributes:
        recipe: see above.
        router: of the tokens of the last model that was prepared, if the file routes any. Set it
            before you prepare a model whose layers you have routed yourself.

    Raises:
        ConfigError: the file contradicts the arguments; names the keys.
    """

    _counts = True
    """Whether it counts micro-batches: a trainer does that itself."""

    def __init__(
        self,
        recipe: Recipe | None,
        layer: type[nn.Module] | None,
        scaler: torch.amp.GradScaler | None,
        **kwargs: Any,
    ) -> None:
        self.recipe, self._layer = recipe, layer
        self.router: TokenRouter | None = None
        if recipe is not None and kwargs.get("gradient_accumulation_plugin") is None:
            kwargs.setdefault("gradient_accumulation_steps", recipe.batch.accumulation)
        super().__init__(**kwargs)
        if recipe is not None:
            # A plugin or an environment variable may have said something else.
            steps = self.gradient_accumulation_steps if self._counts else recipe.batch.accumulation
            low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.mixed_precision)
            _refuse_disagreement(recipe, steps, low)
            # What is computed in 16 bits already needs no autocast, as over DeepSpeed.
            self.native_amp = self.native_amp and recipe.chosen.param_dtype is None
            if scaler is None and recipe.scaling.enabled:
                scaler = recipe.make_scaler(self.device.type)
            # Accelerate's own files go where the shards do.
            self.project_configuration.save_on_each_node |= recipe.node_local
        self.scaler: Any = scaler or self.scaler

    def change(self, model: nn.Module, *, sharded: bool) -> None:
        """Cast, divide and route a model as the file says.

        Raises:
            ConfigError: it is sharded, and was not cast or divided before; or its layers are
                routed, and nobody said by what.
        """
        if self.recipe is None:
            return
        if sharded:
            _refuse_unchanged(self.recipe, model)
        else:
            self.recipe.cast_model(model)
            self.recipe.parallelize(model)
        if self.recipe.routing is None or (self.router is not None and is_routed(model)):
            return
        layer = self._layer or layer_of(model, self.recipe.routing.total_layers)
        self.router = self.recipe.route_tokens(model, layer)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> DataLoader[Any]:
        """As Accelerate, but ranks that share a model or a sequence take the same samples.

        Raises:
            ConfigError: `dispatch_batches` has one process read for all ranks.
        """
        ready = getattr(data_loader, "_is_accelerate_prepared", False)
        if ready or self.recipe is None or not deals(data_loader, self.recipe.batch):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        loader = shared_loader(self, data_loader, self.recipe.batch, device_placement)
        self._dataloaders.append(loader)
        return loader

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Optimizer:
        """As Accelerate; with a file, steps do what `Recipe.step` does."""
        if self.recipe is None or isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        placed = self.device_placement if device_placement is None else device_placement
        wrapped = RecipeOptimizer(
            optimizer, self.recipe, self._after_step, device_placement=placed, scaler=self.scaler
        )
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As Accelerate; a recipe's goes on by one in each step that is not skipped.

        Where ranks share samples, others go on by their groups.
        """
        prepared: Any = super().prepare_scheduler(scheduler)
        if prepared is scheduler:
            return prepared
        batch = None if self.recipe is None else self.recipe.batch
        if isinstance(scheduler, Schedule):
            groups = 1
        elif batch is None or batch.alike == 1 or self.split_batches:
            return prepared
        else:
            groups = batch.groups
        self._schedulers[-1] = GroupScheduler(
            scheduler, prepared.optimizers, groups, prepared.step_with_optimizer
        )
        return self._schedulers[-1]

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As Accelerate; losses of ranks that share a sequence add up to that of the sequence."""
        super().backward(loss if self.recipe is None else loss * self.recipe.loss_factor, **kwargs)
        if self.router is not None:
            self.router.advance()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the scale in the gradients of one optimizer, of several, or of all prepared ones.

        Gradients of a model in parts are completed before.
        """
        given = self._optimizers if optimizer is None else optimizer
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, RecipeOptimizer):
                each.complete_gradients()
            if self.scaler is not None:
                self.scaler.unscale_(each.optimizer if hasattr(each, "optimizer") else each)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: int = 2
    ) -> Tensor | None:
        """As Accelerate; of a model in parts by the norm of the whole.

        Raises:
            ConfigError: ranks share a model, and the norm is not the 2-norm.
        """
        if self.parts is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ConfigError(
                f"norm_type is {norm_type}, and ranks share a model", "clip by the 2-norm"
            )
        self.unscale_gradients()
        return self.parts.clip_grad_norm_(parameters, max_norm)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As Accelerate; of ranks that share samples, what the first has."""
        if self.recipe is None or self.recipe.batch.alike == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        return gather_once(self, input_data, self.recipe.batch, as_objects=use_gather_object)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Full values on the host of rank 0, an empty dict elsewhere; every rank calls it.

        Args:
            model: prepared.
            unwrap: makes no difference: names are those of the plain model.
        """
        if self.parts is not None:
            return joined_state_dict(model, self.parts)
        return checkpoint.full_state_dict(model)

    def save_shards(self, folder: Path, model: nn.Module, optimizer: Optimizers | None) -> None:
        """Save rows, each part of a model in a folder of its own; every rank calls it.

        With `save_on_each_node`, or a file that asks for it, each node has its own disk.
        """
        extra = None if self.router is None else {"router": self.router.state_dict()}
        node_local = self.project_configuration.save_on_each_node
        checkpoint.save(self._part(folder), model, optimizer, extra, node_local=node_local)

    def load_shards(
        self, folder: Path, model: nn.Module, optimizer: Optimizers | None = None
    ) -> None:
        """Load what `save_shards` saved; with an optimizer, tokens are routed as they were then.

        Raises:
            CheckpointError: something is missing, damaged or of another model.
        """
        node_local = self.project_configuration.save_on_each_node
        if not node_local:  # else a node may have some parts only
            _refuse_other_parts(folder, self.parts)
        extra = checkpoint.load(self._part(folder), model, optimizer, node_local=node_local)
        if self.router is None or not optimizer:
            return
        if extra is None:
            raise CheckpointError(
                f"{folder} was saved without random_ltd, and the file enables it",
                "go on with the file that the run began with",
            )
        self.router.load_state_dict(extra["router"])

    @property
    def parts(self) -> TensorParallel | None:
        """How ranks share a model, if they do."""
        return None if self.recipe is None else self.recipe.tensor_parallel

    def _part(self, folder: Path) -> Path:
        return folder if self.parts is None else folder / f"part{self.parts.part}"

    def _after_step(self) -> None:
        if self.router is not None:
            self.router.step()


def _refuse_unchanged(recipe: Recipe, model: nn.Module) -> None:
    """What comes before sharding was to be done by whoever sharded the model."""
    name = type(model).__name__
    if uncast := recipe.casts.left_of(model):
        raise ConfigError(
            f"{name} is sharded already, and was not cast as the file says",
            "leave sharding to prepare, or call recipe.cast_model(model) before it",
            uncast,
        )
    if recipe.tensor_parallel is not None and not recipe.tensor_parallel.held:
        raise ConfigError(
            f"{name} is sharded already, and whole on ranks that share it",
            "leave sharding to prepare, or call recipe.parallelize(model) before it",
        )


def _refuse_other_parts(folder: Path, parts: TensorParallel | None) -> None:
    held, wanted = len(list(folder.glob("part*"))), 0 if parts is None else parts.size
    if folder.is_dir() and held != wanted:
        raise CheckpointError(
            f"{folder} holds {held or 'no'} parts of a model, and {wanted or 'no'} ranks share one",
            "go on with the autotp_size of the run that saved it, or from its full weights",
        )


def _refuse_disagreement(recipe: Recipe, steps: int, low: torch.dtype | None) -> None:
    computed = recipe.chosen.param_dtype
    batch, ranks = recipe.batch, dist.get_world_size() if dist.is_initialized() else 1
    refuse_contradictions(
        {
            "number of ranks": (batch.groups * batch.alike, ranks),
            "gradient_accumulation_steps": (batch.accumulation, steps),
            "mixed_precision": (computed, computed and (low or computed)),
            "torch_autocast": (recipe.autocast_dtype, None),
        },
        "the accelerator",
        "read the file where the ranks are; leave accumulation to it: out of the arguments, of a "
        "plugin and of ACCELERATE_GRADIENT_ACCUMULATION_STEPS; say bf16 or fp16 in it, or "
        "mixed_precision here, instead of autocast",
    )
