"""The command `zerofx`: what can be known before, and besides, a run.

Stands on top of all other folders, of which `debug` takes `units` from here. A subcommand is
an entry of `arguments` and a file with `run`. Modules: main, command, arguments, progress,
completion, units, targets, inputs, architectures, machine, plan, plan_text, plan_wire, explain,
diff, report, checkpoint, bench.
"""
