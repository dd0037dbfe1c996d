"""Sequence parallelism: Dynamo's graph of whole sequences becomes one of a rank's positions.

Modules: `marks` says which inputs are sequences; `divide` goes through a graph, which `graph`
edits; `rules` say what operations become, by `equations` for products, `attention` and `losses`;
`cuts` are how values are divided, `operations` what nodes do.
"""
