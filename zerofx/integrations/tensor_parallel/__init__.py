"""Tensor parallelism by rules: ranks hold some rows or columns of a model's linear layers.

Modules: linear, rules, division, parts, export.
"""

from zerofx.integrations.tensor_parallel.export import export_joined
from zerofx.integrations.tensor_parallel.parts import TensorParallel
from zerofx.integrations.tensor_parallel.rules import PRESETS, Rule

__all__ = ["PRESETS", "Rule", "TensorParallel", "export_joined"]
