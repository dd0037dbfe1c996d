"""Execution: process groups, collectives, buffers, the handle table.

Touches device memory and the network; knows nothing of graphs but their vocabulary. Modules:
handles, session, domain, params, accumulation, dtensor_rules, buffers, kept, comm, pending, mail,
exchange, two_hop, collectives, journal, watch, markers, execute.
"""
