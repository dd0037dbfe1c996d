"""What DTensor lacks: sharding rules, a version counter, numbers that are the whole tensor's.

And what torch does for `DTensor` alone, for our kinds of it.

Importing this module registers all of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.runtime.answers import (
    like_a_parameter,
    of_library,
    of_whole,
    ours_in,
    with_plain,
)
from zerofx.runtime.handles import reading
from zerofx.runtime.in_place import note_cleared
from zerofx.runtime.parameter import local_tensor, take_place
from zerofx.runtime.views import KINDS, copied_among, look_through, write_through
from zerofx.torch_private import (
    answer_collectives,
    answer_operations,
    answer_other_libraries,
    compute_pointwise,
    count_foreach_writes,
    find_extremes,
    find_overflow_of_all,
    follow_views,
    foreach_by_default,
    read_scalars_whole,
    reduce_all_rows,
    remember_shapes,
    reshape_in_place,
    torchs_way,
    update_local_tensors,
)

# Updates by hand, averages of weights, Rprop; `zero_grad(set_to_none=False)` drops held-back sums.
count_foreach_writes(note_cleared, copied_among)
compute_pointwise()
update_local_tensors()
foreach_by_default(*KINDS)
find_overflow_of_all()


def _global_value(number: DTensor) -> Tensor:
    """What all ranks hear alike; of a `DTensor` that is not zerofx's what torch gives each."""
    with reading(number.device_mesh) as is_ours:
        return number.full_tensor() if is_ours else local_tensor(number)


# Clipping by hand, and skipping steps that overflow, ask for norms.
read_scalars_whole(_global_value)
find_extremes()
reduce_all_rows()
remember_shapes()
reshape_in_place(take_place)  # nn.init.orthogonal_ of wide matrices


# Averages of weights that were copied before these were sharded; penalties in a loss; masks.
answer_operations(with_plain, of_whole, like_a_parameter)

# Rows that are edited: `weight[3].zero_()`, `torch.chunk(bias, 4)[1].fill_(1)`.
follow_views(copied_among, look_through, write_through)


def answer_libraries() -> None:
    """Let operations of libraries that have been imported by now take sharded tensors, too."""
    answer_other_libraries(of_library(with_plain), of_library(of_whole), like_a_parameter)


def _refuse_collective(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loop that averaged gradients, or sent weights round, by itself."""
    if not ours_in((args, kwargs)):
        return torchs_way(op, args, kwargs)
    raise UnsupportedError(
        f"{op} is given a DTensor of a sharded model, of which ranks may hold different rows",
        "leave the line out, if it averages gradients or makes weights alike, as zerofx has done "
        "so; or give it value.full_tensor(), or this rank's rows: value.to_local()",
    )


answer_collectives(_refuse_collective)
