"""Execution: process groups, collectives, buffers, the handle table.

Touches device memory and the network; knows nothing of graphs but their vocabulary. Modules:
handles, session, domain, params, chunks, accumulation, overflow, loss_scale, finite,
dtensor_rules, buffers, kept, network, comm, pending, mail, exchange, two_hop, collectives,
quantized, calibrate, speed, journal, watch, markers, execute.
"""
