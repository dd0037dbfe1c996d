"""Execution: process groups, collectives, buffers, the handle table.

Touches device memory and the network; knows nothing of graphs but their vocabulary. Modules:
handles, session, axes, domain, params, chunks, accumulation, overflow, dtensor_rules, buffers,
kept, secondary, rounds, network, comm, pending, mail, exchange, two_hop, collectives, calibrate,
journal, watch, markers, execute.
"""
