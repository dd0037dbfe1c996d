"""`Session`: what one sharded model owns at run time."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx.runtime.dtensor_rules
import zerofx.runtime.pickles  # noqa: F401 (registers them)
from zerofx.config import ZeroConfig
from zerofx.runtime.accumulation import Accumulation, Held
from zerofx.runtime.axes import Axes, layouts_of, make_axes, make_mesh
from zerofx.runtime.buffers import BufferSync
from zerofx.runtime.comm import Comm
from zerofx.runtime.domain import Domain
from zerofx.runtime.gathered import GatheredMemory
from zerofx.runtime.gradients import widen_gradients
from zerofx.runtime.handed_out import HandedOut
from zerofx.runtime.handles import new_handle
from zerofx.runtime.journal import Journal
from zerofx.runtime.kept import KeptValues
from zerofx.runtime.members import members, new_key
from zerofx.runtime.network import Network, agree_on_network
from zerofx.runtime.overflow import mixed_gradients, share_overflow
from zerofx.runtime.ownership import states_of
from zerofx.runtime.parameter import local_tensor
from zerofx.runtime.params import ParamState
from zerofx.runtime.pending import Pending
from zerofx.runtime.quantized import CodeMemory
from zerofx.runtime.watch import Watch
from zerofx.torch_private import default_store, recompile_limit


class Session:
    """Composes configuration, groups, parameters and memory of one sharded model.

    Attributes:
        config: the user's choices.
        mesh: 1-D `(shard,)` or 2-D `(replicate, shard)`.
        device: of the parameters.
        states: the parameters, in registration order.
        num_registered: parameters so far, with those that the model no longer has.
        sharded: domain of parameters split over the shard axis.
        replicated: domain of parameters that every rank holds whole.
        gathered: memory of gathered values.
        kept: those among them that forward left for backward.
        handed_out: full values that code outside of programs holds.
        codes: what is remembered of codes.
        journal: the collectives issued so far.
        watch: looks on while this rank waits.
        scales_losses: something is computed in fp16, for which users scale losses.
        network: how ranks lie, and what their collectives cost.
        axes: of the mesh, as this rank sees them.
        least_sharded: elements from which on a parameter is sharded.
        accumulation: which backwards hold gradients back.
        buffers: when they get rank 0's values.
        recompile_limit: of Dynamo, when it compiled the last program.
        may_grow: plain parameters, or modules, were registered somewhere since the last forward.
    """

    def __init__(
        self,
        config: ZeroConfig,
        device: torch.device,
        least_sharded: int,
        copied: Session | None = None,
        network: Network | None = None,
    ) -> None:
        self.config = config
        self.least_sharded = least_sharded
        self.scales_losses = torch.float16 in (config.param_dtype, config.reduce_dtype)
        self.device = device
        self.mesh = make_mesh(config, device) if copied is None else copied.mesh
        self.states: list[ParamState] = []
        self.num_registered = 0
        self._root: weakref.ref[nn.Module] | None = None
        self.gathered = GatheredMemory()
        self._left: list[Pending] = []
        self.kept = KeptValues(self.gathered, config.memory_budget or 0)
        self.handed_out = HandedOut()
        self.codes = CodeMemory.empty(config.drift_every)
        ranks = members(self.mesh)
        # One rank may copy or unpickle alone: that counts neither for new models nor in messages.
        kind = "model" if network is None else "unpickled model"
        self.key = copied.next_copy() if copied is not None else new_key(kind, ranks)
        alike = self.key if network is None else kind
        self._origin = alike if copied is None else f"{copied._origin}/copy"
        self._num_copies = 0
        self._is_copy = copied is not None
        about = config.added_passes, self._origin, config.hang_timeout
        self.journal = Journal(self.key, default_store(), dist.get_rank(), ranks, *about)
        self.watch = Watch(self.journal, config.hang_timeout)
        if len(ranks) > 1:
            self.watch.start()
        network = network if copied is None else copied.network
        # Copied and unpickled by one rank alone, perhaps: those must not ask the others.
        self.network = network or agree_on_network(self.journal, config, self.mesh, device)
        node = copied.axes.node if copied is not None else None
        self.axes = make_axes(config, self.mesh, self.network, device, node)
        self.sharded, self.replicated = self._domains()
        self.accumulation = Accumulation(_held_back(config, self.axes), config.accumulate)
        self.buffers = BufferSync()
        self.recompile_limit = recompile_limit()
        self.may_grow = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled model is its own model: own handles and memory.
        return Session, (self.config, self.device, self.least_sharded, None, self.network)

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return Session(self.config, self.device, self.least_sharded, self)

    def next_copy(self) -> str:
        """Key of the next copy of this model."""
        self._num_copies += 1
        return f"{self.key}/copy{self._num_copies}"

    @property
    def world(self) -> Comm:
        """All ranks of the mesh."""
        return self.axes.world

    def root(self) -> nn.Module | None:
        """The model that was sharded, while it lives."""
        return self._root() if self._root is not None else None

    def set_root(self, model: nn.Module) -> None:
        """Remember the model that was sharded."""
        self._root = weakref.ref(model)

    def domain_for(self, shape: Sequence[int]) -> Domain:
        """Where a parameter of this global shape belongs: split, or whole on every rank."""
        small = not shape or math.prod(shape) < self.least_sharded
        return self.replicated if small or not self.sharded.layout.sharded else self.sharded

    def wait(self, pending: Pending) -> list[Tensor]:
        """Wait for a collective and finish it, unless that was done; one value per member.

        Raises:
            DivergedError: the ranks issued different collectives.
            RankGoneError: ranks ended.
        """
        self.settle()
        while not pending.done:
            self.advance(pending)
        return pending.values

    def abandon(self, flying: Sequence[Pending]) -> None:
        """A program stopped midway, and leaves collectives under way to `settle`."""
        self.gathered.abandon()
        self._left += [Pending([], pending.works, pending.keep) for pending in flying]

    def settle(self) -> None:
        """Wait for what programs left that stopped: gloo sends no more to who drops a message."""
        while self._left:
            self.advance(self._left.pop())

    def advance(self, pending: Pending) -> None:
        """Wait for the hop under way, and start the next one if there is one."""
        with self.explained():
            pending.advance(self._wait_for)

    def advance_if_short(self, pending: Pending) -> None:
        """Let what follows a short first wait overlap with what the program does next."""
        if pending.is_short:
            self.advance(pending)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Say why a collective failed, if ranks issued different ones or are gone."""
        return self.watch.explained()

    def is_average(self) -> bool:
        """Whether this is a copy that nobody trains: an average of weights, a target network.

        Such copies are updated by other means than an optimizer, whose hooks would tell.
        """
        return self._is_copy and not self.accumulation.begun

    def enter_backward(self) -> None:
        """Called by every reduction; the first one of a backward pass opens it."""
        self.accumulation.enter(self.states, self._leave_backward)

    def optimizer_stepped(self, params: Iterable[Tensor], *, applies: bool) -> None:
        """An optimizer updated `params`, unless its rate is zero: resident copies are stale."""
        for state in states_of(params, self.states):
            self.accumulation.stepped()
            # What has no gradient is not updated: frozen parameters keep their copies and codes.
            if state.param.grad is not None:
                self.codes.frozen.drop(state)
                state.num_updates += applies
            if state.param.grad is not None or state.param.requires_grad:
                self.forget_values(state)

    def refresh(self) -> None:
        """Shards changed without a trace: every copy of them, and what was learnt, is of no use."""
        self.codes.errors.clear()
        for state in self.states:
            self.forget_values(state)
            self.codes.frozen.drop(state)

    def forget_values(self, state: ParamState) -> None:
        """Copies of full values are of no use: the shard changed, maybe on other ranks."""
        state.dirty = True
        self.kept.drop(state)
        if state.domain.secondary is not None:
            state.domain.secondary.drop(state)

    def drop(self, gone: Sequence[ParamState]) -> None:
        """Forget parameters that the model no longer has; an optimizer may step them yet."""
        widen_gradients(gone)
        for state in gone:
            self.forget_values(state)
            self.codes.frozen.drop(state)
        self.states[:] = [state for state in self.states if state not in gone]

    def refuse_pending(self, params: Iterable[Tensor]) -> None:
        """Raise if an optimizer is about to step over gradients that were held back."""
        self.accumulation.refuse_pending(self.states, params)

    @contextlib.contextmanager
    def recorded(self, kind: str, name: str) -> Iterator[Callable[[Any], None]]:
        """Around a collective awaited at once, by what this gives; failures are explained."""
        self.journal.record(kind, name)
        with torch.no_grad(), self.explained():
            yield self._wait_for

    def _leave_backward(self) -> None:
        self.buffers.backward_ended()
        if self.accumulation.leave():
            with self.explained():
                self._flush_pending()
            self.codes.errors.backward_ended()
            if self.scales_losses:
                self.share_overflow(state.param for state in self.states)
            if not self._all_tagged():
                self.journal.check_step()

    def share_overflow(self, params: Iterable[Tensor]) -> None:
        """Show an overflow in any rank's shards of `params` to all ranks of the model."""
        whole, parts = mixed_gradients(params)
        if whole and parts and self.world.size > 1:
            with self.recorded("all_reduce", "overflow") as wait:
                share_overflow(whole, parts, self.world.group, wait)

    def _all_tagged(self) -> bool:
        """Whether ranks out of step can only hang: every collective is made of tagged messages."""
        axis = self.sharded.shard_comm
        mixing = self.sharded.replica_comm or any(s.domain is self.replicated for s in self.states)
        return axis is not None and not axis.algorithms.untagged and not mixing

    def _flush_pending(self) -> None:
        """Exchange sums of parameters that the last backward of an accumulation did not use."""
        for domain in (self.sharded, self.replicated):
            mine = [state for state in self.states if state.domain is domain]
            sums = [(state, state.local_sum.take()) for state in mine]
            held = [
                (s, total) for s, total in sums if total is not None and s.param.grad is not None
            ]
            if not held:
                continue
            pending = domain.start_held([total for _, total in held], [state for state, _ in held])
            for member, (state, _) in enumerate(held):
                reduced = domain.reduce_wait(pending, member, state.shard)
                assert state.param.grad is not None
                local_tensor(state.param.grad).add_(reduced)

    def _wait_for(self, work: Any) -> None:
        if self.device.type == "cpu":
            self.watch.wait(work)
        else:
            work.wait()

    def _domains(self) -> tuple[Domain, Domain]:
        shard, num_ranks = self.axes.shard, self.world.size
        num_shards = shard.size if self.config.stage > 0 else 1
        sharing, replica = shard if num_shards > 1 else self.world, self.axes.replica
        replicas_of_one = 1 if replica is None else replica.node_size
        node_sizes = sharing.node_size, self.world.node_size, replicas_of_one
        handles = new_handle(), new_handle()
        sharded, whole = layouts_of(self.config, num_ranks, num_shards, node_sizes, handles)
        return (
            Domain(
                sharded, self, shard if num_shards > 1 else None, self.axes.replica, self.axes.node
            ),
            Domain(whole, self, None, self.world if num_ranks > 1 else None),
        )


def _held_back(config: ZeroConfig, axes: Axes) -> Held:
    if config.stage < 2:
        return "gradients"
    return "nothing" if axes.replica is None else "means"
