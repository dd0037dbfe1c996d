"""Files of sharded tensors: a pickle has one rank's rows, and a note of which; safetensors none.

`if rank == 0: torch.save(model.state_dict(), …)` is right for a model that every rank has whole.
Of a sharded one it keeps one rank's rows: that is said when it happens, and no other rank takes
them for its own. Importing this module registers it.
"""

from __future__ import annotations

import copyreg
import functools
import logging
from typing import Any, NoReturn

from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.runtime.foreign import WRITTEN, which_rows
from zerofx.runtime.handles import sessions_on
from zerofx.runtime.parameter import local_tensor, plain
from zerofx.runtime.views import KINDS
from zerofx.torch_private import with_local

_log = logging.getLogger(__name__)


def _reduce(value: DTensor) -> Any:
    """Torch's own pickle of a plain `DTensor`, whose rows have memory of their own.

    torch writes all of a buffer that the rows are a view of, or, where they do not begin it, fails:
    it takes a `DTensor` with an offset for a tensor that has memory.
    """
    rows = local_tensor(value).detach()
    if rows.untyped_storage().nbytes() != rows.nbytes:
        rows = rows.clone()
    made = plain(value, with_local(value, rows))
    if sessions_on(value.device_mesh) and (which := which_rows(value, value.device_mesh)):
        say_once()
        setattr(made, WRITTEN, which)
    return made.__reduce_ex__(2)


@functools.cache
def say_once() -> None:
    """Warn, once in a process."""
    _log.warning(
        "pickled, as by torch.save, a sharded tensor is the rows of this rank alone: every rank "
        "must write a file, and read its own. Remedy for one file of whole values: "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) on all ranks, or zerofx.checkpoint"
    )


def _storage(self: DTensor) -> NoReturn:
    """What safetensors asks for last, before it would write rows as if they were the whole."""
    raise UnsupportedError(
        f"a sharded tensor of shape {list(self.shape)} has no memory that safetensors could write",
        "zerofx.checkpoint.export_safetensors(model, folder) on every rank; or, on every rank, "
        "save_pretrained(folder, state_dict=zerofx.checkpoint.full_state_dict(model), "
        "is_main_process=rank == 0)",
    )


for _kind in (DTensor, *KINDS):
    copyreg.pickle(_kind, _reduce)
for _kind in KINDS:
    _kind.storage = _storage
