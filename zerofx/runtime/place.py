"""`Place`: where in a program an error came up, and what to say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

import torch

from zerofx.config import ZeroConfig
from zerofx.errors import OutOfMemoryError, ZeroFxError
from zerofx.runtime.handles import find_domain
from zerofx.runtime.pending import Pending

if TYPE_CHECKING:
    from zerofx.runtime.session import Session

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Place:
    """One step of a program.

    Attributes:
        kind: what it does.
        name: of the collective, as dumps have it; of computation, the modules it is in.
        params: names of the parameters that it moves, or whose full values it reads.
        num_bytes: of the full values that it moves; 0 for computation.
        handle: a layout of the program's model.
        number: of the step in its program.
    """

    kind: Literal["gather", "reduction", "computation"]
    name: str
    params: tuple[str, ...]
    num_bytes: int
    handle: int
    number: int

    def explain(self, error: BaseException, flying: Sequence[Pending]) -> NoReturn:
        """Raise `error`, or what explains it.

        Args:
            error: what the step raised.
            flying: collectives under way, which nobody will wait for.

        Raises:
            OutOfMemoryError: an allocator failed.
            DivergedError: a collective failed since ranks issued different ones.
            RankGoneError: a collective failed since ranks ended.
        """
        domain = find_domain(self.handle)
        if domain is None:
            raise error
        held = domain.session.gathered.used_bytes()
        domain.session.abandon(flying)
        if isinstance(error, ZeroFxError) or not isinstance(error, RuntimeError):
            raise error
        if is_out_of_memory(error):
            raise self._out_of_memory(error, domain.session, held) from error
        with domain.session.explained():
            raise error

    def _out_of_memory(self, error: RuntimeError, session: Session, held: int) -> OutOfMemoryError:
        size = f" ({self.num_bytes / _MIB:.1f} MiB of full values)" if self.num_bytes else ""
        where = f"{self.number}: {self.kind} {self.name}"
        apart = session.journal.drop_step(where, session.config.hang_timeout)
        went_on = f"ranks {', '.join(map(str, apart))} did not run out there"
        found = OutOfMemoryError(
            f"rank {session.world.ranks[session.world.rank]} runs out of memory in {self.kind} "
            f"{self.name}{size}, while {held / _MIB:.1f} MiB of gathered values are in use: "
            f"{str(error).strip().splitlines()[0]}",
            f"{_remedy(self.kind, session.config)}. "
            + (
                f"This model cannot go on, for {went_on}: start again from the last checkpoint"
                if apart
                else "The model can go on: call zero_grad, and run the step again"
            ),
            self.params,
        )
        if apart:
            session.journal.close(found)
        else:
            session.settle()
        return found


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator failed; that of CPUs has no type for it."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in text


def _remedy(kind: str, config: ZeroConfig) -> str:
    """The options that bear on what is held there."""
    gathered = config.stage == 3
    options = {
        "bucket_bytes": kind != "computation",
        "prefetch_bytes": gathered,
        "memory_budget=0": gathered and config.memory_budget != 0,
        "secondary_shards=False": config.secondary_shards,
        "param_dtype=torch.bfloat16": config.param_dtype is None,
        "accumulate=1": config.accumulate > 1 and config.stage < 2,
    }
    lower = " or ".join(name for name in ("bucket_bytes", "prefetch_bytes") if options[name])
    say = ", ".join(name for name, helps in options.items() if "=" in name and helps)
    more = [
        f"lower {lower}" if lower else "",
        f"say {say}" if say else "",
        "" if gathered else f'use backend="zero{config.stage + 1}"',
        "take smaller batches, or wrap layers in torch.utils.checkpoint",
        "see `zerofx plan` for what a step holds",
    ]
    return "; ".join(part for part in more if part)
