"""The torch seam: backends, capture, annotation, the cut, segments, lowering.

Composes all other folders; only public names stand above it. Modules: backend, roots,
running, first_forward, step_guard, capture, watch, annotate, bodies, reads, shards, aliases,
kept_reads, partition, segments, inner, quantize, weigh, places, lower; dump, dump_place, report,
predict, breaks, measure, trial, standalone, plain_graph, plain_ops, plain_codes; joint,
constructors, layouts, rehearsal, micro_programs, views, traffic, stacks, resident, planner, choose.
"""
