"""The command `zerofx`: what can be known before, and besides, a run.

Stands on top of all other folders. A subcommand is a file with `COMMAND`, listed in `main`.
Modules: main, command, progress, completion, units, targets, machine, plan, plan_text,
plan_wire, explain, diff, report, checkpoint, bench.
"""
