"""Tensor parallelism by rules: ranks hold some rows or columns of a model's linear layers.

Modules: linear, rules, division, parts, export.
"""
