"""Checkpoints: torch's own format (`torch.distributed.checkpoint`, DCP), written atomically.

Any DCP program reads what this writes, and the other way round. Modules: store, saving, newest,
nodes, ranks, reader, writer, snapshot, entries, rows, groups, damage, export; source, formats,
deepspeed and convert read what others wrote.
"""

from zerofx.checkpoint.convert import to_dcp, to_safetensors
from zerofx.checkpoint.export import export_safetensors, full_state_dict
from zerofx.checkpoint.formats import open_source
from zerofx.checkpoint.newest import latest
from zerofx.checkpoint.saving import Saving
from zerofx.checkpoint.source import Source, Stored
from zerofx.checkpoint.store import async_save, load, save
from zerofx.checkpoint.writer import AtomicWriter
from zerofx.torch_private import leave_to_python

__all__ = [
    "AtomicWriter",
    "Saving",
    "Source",
    "Stored",
    "async_save",
    "export_safetensors",
    "full_state_dict",
    "latest",
    "load",
    "open_source",
    "save",
    "to_dcp",
    "to_safetensors",
]

leave_to_python("zerofx.checkpoint")
