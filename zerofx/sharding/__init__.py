"""Parameters: turning a plain model into a sharded one, and what held it before.

Touches `nn.Parameter`s and modules. Modules: shard, rows, classes, reading, moves, casts,
comparisons, assignments, old_handles, stale, overlaps, refuse, write_back; and for models without
memory: tape, streams, recorder, unrecorded, agreement, replay, materialise, weights; and paths of
files.
"""
