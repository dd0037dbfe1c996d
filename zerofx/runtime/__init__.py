"""Execution: process groups, collectives, memory, the handle table.

Touches device memory and the network; knows nothing of graphs but their vocabulary. Modules:
handles, session, members, axes, domain, params, local_sum, parameter, user_classes, ownership,
in_place, views, foreign, chunks, accumulation, buffers, overflow, loss_scale, finite, gradients,
answers, dtensor_rules, pickles, host_memory, gathered, kept, secondary, rounds, bucket, network,
comm, pending, mail, exchange, two_hop, collectives, replicas, feedback, frozen, drift, quantized,
owners, owner_state, owner_options, owner_probe, owner_optimizer, handed_out, calibrate, assumed,
speed, differences, roll_call, arrivals, journal, watch, markers, place, execute.
"""
