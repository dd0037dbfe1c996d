"""The program: one transformation a file, and the lists that make a stage.

A pass sees `ir` and `cost` only; it never runs a model, touches a device or calls a collective.
What is exported here is what a pass is written with, built-in or not; see docs/passes.md.
Modules: base, changes, registry, fingerprint, pipelines; merge_unshards, merge_reduces,
cast_before_gather, copy_returned, insert_unshards, insert_reduces, insert_frees, sync_buffers;
quantize, quantize_unshards, quantize_reduces, buckets, fuse_unshards, fuse_reduces,
keep_unsharded, seams, room, schedule, add_secondary_shards.
"""

from zerofx.ir import ops, view
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts, Role, facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout, ParamSpec, Region
from zerofx.ir.text import print_program
from zerofx.passes.base import Pass
from zerofx.passes.changes import Change, after, before, replace, without

__all__ = [
    "Change",
    "Editor",
    "Facts",
    "Layout",
    "ParamSpec",
    "Pass",
    "Program",
    "Region",
    "Role",
    "after",
    "before",
    "facts",
    "ops",
    "print_program",
    "replace",
    "view",
    "without",
]
