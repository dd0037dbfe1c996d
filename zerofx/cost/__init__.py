"""Numbers: what communication and kernels cost, and what programs hold.

Modules: comm, tables, compute, memory, messages, liveness, lifetimes, curve, fusion, lines,
forecast, surface, micro_batches, link, host, processor, machine.
"""
