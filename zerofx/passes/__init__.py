"""The program: one transformation a file, and the lists that make a stage.

A pass sees `ir` and `cost` only; it never runs a model, touches a device or calls a collective.
Modules: base, pipelines, merge_unshards, merge_reduces, cast_before_gather, copy_returned,
insert_unshards, insert_reduces, insert_frees, sync_buffers; buckets, fuse_unshards, fuse_reduces,
keep_unsharded, seams, schedule.
"""
