"""`TensorParallel`: a model in parts, each sharded by zerofx over the ranks that hold it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from zerofx.errors import ConfigError, DivergedError
from zerofx.integrations.tensor_parallel.division import (
    Held,
    cut_of,
    divide,
    is_summed,
    mark,
    plan,
    share_random_numbers,
)
from zerofx.integrations.tensor_parallel.rules import Rule, idle_patterns, rules_in
from zerofx.runtime.handles import states_by_param
from zerofx.runtime.overflow import share_overflow
from zerofx.sequence.cuts import Place
from zerofx.torch_private import name_of

_log = logging.getLogger(__name__)
_MOST_APART = 0.05  # of a norm; what GPUs add up in any order differs by less


@dataclasses.dataclass
class TensorParallel:
    """Ranks next to each other share a model; ranks that hold the same part shard it.

    Attributes:
        size: ranks that share a model.
        rules: for its layers; without any those that the model brings along.
        strict: a linear layer that no rule fits is an error.
        held: how layers are held, by name; empty until the model is divided.

    Raises:
        ConfigError: the size is not positive.
    """

    size: int
    rules: tuple[Rule, ...] = ()
    strict: bool = False
    held: dict[str, Held] = dataclasses.field(default_factory=dict, compare=False)
    _compared: bool = dataclasses.field(default=False, init=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(
                f"{self.size} ranks cannot share a model", "let TensorParallel's size be 1 or more"
            )

    def __str__(self) -> str:
        lines = [f"{name}: {each.way}" for name, each in self.held.items()]
        return "\n".join([f"{self.size} ranks share a model", *lines])

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """Axes `data` and `model`, over all ranks.

        Raises:
            ConfigError: there is no process group, or its ranks are no multiple of the size.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "tensor_parallel needs a process group", "call init_process_group before"
            )
        if dist.get_world_size() % self.size:
            raise ConfigError(
                f"{dist.get_world_size()} ranks are no multiple of autotp_size {self.size}",
                "change one of them",
            )
        shape = (dist.get_world_size() // self.size, self.size)
        kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        return init_device_mesh(kind, shape, mesh_dim_names=("data", "model"))

    @property
    def part(self) -> int:
        """Which part of the model this rank holds, from 0."""
        return self.mesh.get_local_rank("model")

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's model."""
        return self.mesh.get_group("model")

    def parallelize(self, model: nn.Module) -> None:
        """Take the values of rank 0, keep this rank's part, and draw the same random numbers.

        Raises:
            ConfigError: the model is sharded, has no plan, or cannot be cut so.
            UnsupportedError: a layer, or the style of a plan, is not known here.
        """
        rules = self.rules or rules_in(model)
        if not rules:
            raise ConfigError(
                f"{type(model).__name__} brings no tp_plan along",
                'give rules for its layers, as Rule(r".*up_proj", "outputs"); in a file, '
                "tensor_parallel.partition_config has them, or a preset_model",
            )
        held = plan(model, rules, self.size, strict=self.strict)
        for pattern in idle_patterns(self.rules, model) if dist.get_rank() == 0 else ():
            _log.warning(
                "a rule of TensorParallel has the pattern %r, which fits no parameter of %s that "
                "it could hold: patterns are matched from the beginning of names such as %s",
                pattern,
                type(model).__name__,
                f"{next(iter(held))}.weight",
            )
        first = dist.get_process_group_ranks(self.group)[0]
        for value in (*model.parameters(), *model.buffers()):
            dist.broadcast(value.data, first, group=self.group)
        share_random_numbers(first, self.group)
        divide(model, held, Place(name_of(self.group), self.part, self.size))
        self.held.update(held)
        mark(model, held, rules)
        self._compared = False

    def complete_gradients(self, params: Iterable[Tensor]) -> None:
        """Sum what ranks computed in parts; after the last backward of a step.

        The first time gradients of what all ranks hold are compared.

        Raises:
            ConfigError: the model is whole.
            DivergedError: they differ, so the rules do not suit the model, or ranks that share
                it have been given different samples.
        """
        if not self.held:
            raise ConfigError(
                "ranks share a model that is whole on each", "call parallelize(model) before"
            )
        given = [param for param in params if param.grad is not None]
        for param in filter(is_summed, given):
            dist.all_reduce(_local(param.grad), group=self.group)
        whole = [param for param in given if cut_of(param) is None]
        if whole and not self._compared:
            self._compare(whole)

    def _compare(self, whole: Sequence[Tensor]) -> None:
        """If some have overflowed nothing can be said: those of a later step are compared."""
        seen = torch.stack([_summary(_local(param.grad)) for param in whole])
        everyone = seen.new_empty((self.size, *seen.shape))
        dist.all_gather(list(everyone), seen, group=self.group)
        self._compared = bool(everyone.isfinite().all())
        apart, norms = everyone.amax(0) - everyone.amin(0), everyone[..., :1].amax(0)
        differ = (apart > _MOST_APART * norms).any(1).tolist()
        if self._compared and any(differ):
            known = states_by_param()
            wrong = [param for param, bad in zip(whole, differ, strict=True) if bad]
            raise DivergedError(
                "ranks that share a model have different gradients of what they all hold",
                "give them the same samples; a parameter of which each computes a part of the "
                "gradient needs a layer_spec with grad_allreduce",
                [known[id(each)].spec.name if id(each) in known else "?" for each in wrong],
            )

    def share_overflow(self, params: Iterable[Tensor]) -> None:
        """Make a gradient infinite where that of another part is not finite."""
        grads = [_local(param.grad) for param in params if param.grad is not None]
        held = [grad for grad in grads if grad.numel()]
        if held:  # ranks that share a model hold equally much of it
            share_overflow(held[:1], held, self.group, dist.Work.wait)

    def clip_grad_norm_(self, params: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, with the 2-norm of the whole model.

        Returns:
            The norm before clipping, 0-d.
        """
        params = [params] if isinstance(params, Tensor) else list(params)
        square = self._square([p for p in params if cut_of(p) is not None])
        dist.all_reduce(square, group=self.group)
        norm = (square + self._square([p for p in params if cut_of(p) is None])).sqrt()
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def _square(self, params: Sequence[Tensor]) -> Tensor:
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            return torch.zeros((), device=self.mesh.device_type)
        norm = nn.utils.get_total_norm(grads)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()


def _local(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _summary(grad: Tensor) -> Tensor:
    """The norm, and a product that tells gradients of equal norm apart."""
    flat = grad.detach().reshape(-1).float()
    waves = torch.arange(len(flat), device=flat.device).cos()
    return torch.stack((flat.norm(), flat.dot(waves) / math.sqrt(2)))
