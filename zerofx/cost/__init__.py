"""Numbers: what communication and kernels cost, and what programs hold.

Modules: comm, compute, memory, liveness, fusion, lines, forecast, link.
"""
