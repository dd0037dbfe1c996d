"""Checkpoints: torch's own format (`torch.distributed.checkpoint`, DCP), written atomically.

Any DCP program reads what this writes, and the other way round. Modules: store, writer, snapshot,
damage, export.
"""

from zerofx.checkpoint.export import export_safetensors, full_state_dict
from zerofx.checkpoint.store import Saving, async_save, latest, load, save
from zerofx.checkpoint.writer import AtomicWriter

__all__ = [
    "AtomicWriter",
    "Saving",
    "async_save",
    "export_safetensors",
    "full_state_dict",
    "latest",
    "load",
    "save",
]
