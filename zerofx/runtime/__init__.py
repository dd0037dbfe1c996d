"""Execution: process groups, collectives, buffers, the handle table.

Touches device memory and the network; knows nothing of graphs but their vocabulary. Modules:
handles, session, axes, domain, params, chunks, accumulation, overflow, loss_scale, finite,
dtensor_rules, buffers, kept, secondary, rounds, network, comm, pending, mail, exchange, two_hop,
collectives, replicas, feedback, frozen, drift, quantized, calibrate, speed, journal, watch,
markers, execute.
"""
