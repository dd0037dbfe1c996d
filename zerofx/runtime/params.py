"""`ParamState`: one sharded parameter's memory on this rank."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from zerofx.errors import ShardingError
from zerofx.ir.spec import ParamSpec
from zerofx.runtime.chunks import allocate, padded_chunk
from zerofx.runtime.foreign import WRITTEN, which_rows
from zerofx.runtime.gradients import hold_gradients_in
from zerofx.runtime.local_sum import LocalSum
from zerofx.runtime.ownership import own
from zerofx.runtime.parameter import local_tensor, take_place
from zerofx.runtime.user_classes import make_writable
from zerofx.torch_private import shares_storage

if TYPE_CHECKING:
    from zerofx.runtime.domain import Domain
    from zerofx.runtime.session import Session


PART = "tensor_parallel_cut"
"""Attribute of parameters of which ranks that share a model hold columns, or some rows."""


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer steps over, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The same, where a search found the optimizer: it may be half built, and runs no code."""
    groups = vars(optimizer).get("param_groups", ())
    return [param for group in groups for param in group["params"]]


def asks_for_losses(kind: Any) -> bool:
    """Whether a class of optimizers, LBFGS among torch's, steps with a closure only."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    return closure is not None and closure.default is inspect.Parameter.empty


class ParamState:
    """Where a parameter's bytes are, and whether the resident copy is current.

    Attributes:
        spec: name, global shape and layout.
        domain: groups and options it shares with others of its layout.
        param: the `nn.Parameter` that holds the `DTensor`.
        buffer: 1-D; the padded chunk, or the padded full value for a resident layout. The local
            shard is a view into it, unless the full value has another dtype: then it is the master
            copy, apart from the resident one, which may be gone until the next gather. `None` for
            replicated parameters, and for sharded ones that `.to()` moved.
        dirty: the shard changed since the resident copy was gathered.
        num_updates: that leave no trace in the parameter's version: by optimizers, among others.
        local_sum: full local gradients that are not exchanged yet.
    """

    def __init__(
        self, spec: ParamSpec, domain: Domain, param: torch.nn.Parameter, buffer: Tensor | None
    ) -> None:
        self.spec = spec
        self.domain = domain
        self.param = param
        make_writable(param)
        if spec.layout.grad_dtype is not None:
            hold_gradients_in(param, spec.grad_dtype)
        self.buffer = buffer
        self.dirty = False
        self.num_updates = 0
        self._num_idle = self._before_idle = 0
        self.local_sum = LocalSum(param, spec.name)
        self._seen = self.versions()
        own(param, self)
        domain.register(self)
        domain.session.states.append(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Whoever else holds the parameter, an optimizer say, holds that of the copied model, too.
        session, spec = self.domain.session, self.spec
        return rebuild_state, (session, spec.name, spec.tied, spec.param_dtype, self.param)

    @property
    def shard(self) -> Tensor:
        """The local shard, without padding."""
        return local_tensor(self.param)

    @property
    def chunk_numel(self) -> int:
        """Elements of the padded chunk."""
        return self.spec.chunk_rows * self.spec.row_numel

    def chunk(self, shard: Tensor, out: Tensor) -> Tensor:
        """The padded chunk of `shard`, 1-D, in the dtype of `out`, which will receive all chunks.

        A cast is made right in its place there; a copy only if `shard` left its buffer.
        """
        own = self._own_slot()
        if own is None or own.dtype is not out.dtype:
            return padded_chunk(shard, out, self.domain.shard_rank, self.chunk_numel)
        if not shares_storage(shard, own):
            own[: shard.numel()].copy_(shard.reshape(-1))
        return own

    def resident_copy(self) -> Tensor:
        """Memory of the padded full value, 1-D."""
        if self.buffer is None:
            dtype = self.spec.full_dtype
            with torch.inference_mode(False):  # an evaluation may be the first to need it
                self.buffer = self.shard.new_empty(self.spec.padded_numel, dtype=dtype)
        return self.buffer

    def drop_resident_copy(self) -> None:
        """Free the memory of a resident copy that lies apart from the shard, until it is read."""
        if self.spec.layout.resident and self.spec.cast is not None:
            self.buffer, self.dirty = None, True

    def rehouse(self) -> None:
        """Follow the parameter to another dtype or device (`.to()`)."""
        self.domain.session.buffers.moved()
        shard, buffer = self.shard, self.buffer
        self.spec = dataclasses.replace(self.spec, dtype=shard.dtype)
        if buffer is None or shares_storage(buffer, shard):
            return
        dtype = self.spec.full_dtype
        if not self.spec.layout.resident:
            self.buffer = None  # padding is not worth a second copy of the shard
        elif (buffer.dtype, buffer.device) != (dtype, shard.device):
            self.buffer = buffer.to(dtype=dtype, device=shard.device)
            self.dirty = True

    def is_stale(self) -> bool:
        """Whether the resident full copy may differ from the shards."""
        return self._edited() or self.domain.session.is_average()

    def _edited(self) -> bool:
        return self.dirty or self.versions() != self._seen

    def mark_current(self) -> None:
        """The resident copy was just gathered."""
        if self.buffer is not None and self._edited():
            # Readers of the resident copy that autograd saved are out of date from here on.
            torch.autograd.graph.increment_version(self.buffer)
        self.domain.session.handed_out.renew(self)
        self.dirty = False
        self._seen = self.versions()

    def _own_slot(self) -> Tensor | None:
        if self.buffer is None:
            return None
        start = self.domain.shard_rank * self.chunk_numel if self.spec.layout.resident else 0
        return self.buffer.narrow(0, start, self.chunk_numel)

    def idle_step_begins(self) -> None:
        """An optimizer whose rate is zero is about to write the values that are there."""
        self._before_idle = self.param._version

    def idle_step_ends(self) -> None:
        """It has done so, if it has the parameter."""
        self._num_idle += self.param._version - self._before_idle

    def num_edits(self) -> int:
        """How often the parameter got other values, through its `.data`, too."""
        return self.num_updates + self.param._version - self._num_idle

    def versions(self) -> tuple[int, int, int]:
        """What differs after somebody edited the parameter, except through its shard's `.data`."""
        # The two counters differ: an in-place op on the DTensor bumps one, on the local the other.
        return self.param._version, self.shard._version, self.shard.data_ptr()


def make_state(
    domain: Domain,
    name: str,
    tied: tuple[str, ...],
    full_shape: torch.Size,
    requires_grad: bool,
    fill: Callable[[Tensor, Tensor | None], None],
    like: Tensor,
    param_dtype: torch.dtype | None,
    holder: nn.Parameter | None = None,
) -> ParamState:
    """Allocate a parameter's buffer, fill it, and let an `nn.Parameter` hold the shard.

    Args:
        domain: where it belongs.
        name: fully qualified name.
        tied: other names.
        full_shape: global shape.
        requires_grad: of the parameter.
        fill: writes the values into the shard and, if resident, the unpadded full value (1-D).
        like: dtype and device.
        param_dtype: of full values; `None`: that of `like`.
        holder: an `nn.Parameter` that is a `DTensor`; by default a new one.
    """
    number = _next_index(domain.session)
    spec = ParamSpec(
        name,
        number,
        full_shape,
        like.dtype,
        requires_grad,
        domain.layout,
        tied,
        param_dtype=param_dtype,
    )
    buffer, shard = allocate(spec, domain.shard_rank, like)
    resident = buffer[: spec.numel] if spec.layout.resident and buffer is not None else None
    fill(shard, resident)
    made = as_dtensor(shard, full_shape, domain).detach()  # with a count of writes of its own
    if holder is None:
        holder = nn.Parameter(made, requires_grad=requires_grad)
    else:
        take_place(holder, made)
    return ParamState(spec, domain, holder, buffer)


def adopt_param(
    domain: Domain, name: str, param: nn.Parameter, param_dtype: torch.dtype | None
) -> ParamState:
    """Make a `DTensor` parameter that lies as `domain`'s do one of the model.

    The object and its memory stay the same; a resident copy is added to it.
    """
    index, layout = _next_index(domain.session), domain.layout
    spec = ParamSpec(
        name,
        index,
        param.shape,
        param.dtype,
        param.requires_grad,
        layout,
        param_dtype=param_dtype,
    )
    buffer = None
    if layout.resident:
        buffer, _ = allocate(spec, domain.shard_rank, local_tensor(param))
    state = ParamState(spec, domain, param, buffer)
    state.dirty = True
    return state


def _next_index(session: Session) -> int:
    session.num_registered += 1
    return session.num_registered - 1


def rebuild_state(
    session: Session,
    name: str,
    tied: tuple[str, ...],
    param_dtype: torch.dtype | None,
    param: nn.Parameter,
) -> ParamState:
    """The state of a copied or unpickled parameter, which gets memory as `session` has it.

    Raises:
        ShardingError: another rank pickled it, or this one as one of other ranks.
    """
    values = local_tensor(param)
    own = which_rows(cast(DTensor, param), session.mesh)
    written = vars(param).pop(WRITTEN, own)

    def fill(shard: Tensor, _: Tensor | None) -> None:
        if shard.shape != values.shape or written != own:
            raise ShardingError(
                f"the copied shard of {name} has shape {tuple(values.shape)} and is part "
                f"{written}; this one of {session.world.size} ranks holds {tuple(shard.shape)}, "
                f"part {own}",
                "unpickle what this rank pickled, on as many ranks; to change their number, save "
                "model.state_dict() with torch.distributed.checkpoint",
            )
        shard.copy_(values)

    domain = session.domain_for(param.shape)
    state = make_state(
        domain, name, tied, param.shape, param.requires_grad, fill, values, param_dtype, param
    )
    state.dirty = True
    return state


def as_dtensor(local: Tensor, shape: torch.Size, domain: Domain) -> DTensor:
    """A `DTensor` of global `shape` that lies as `domain`'s parameters do."""
    mesh = domain.session.mesh
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if domain.layout.sharded:
        placements[-1] = Shard(0)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
