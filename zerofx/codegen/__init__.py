"""Kernels of ZeRO++: a `KernelSpec` in, a callable out.

Knows `ir` and nothing of programs, passes or process groups; Triton is imported by emitted files
only. Modules: blocks, functions, operands, calls, reference (what kernels mean, in plain torch);
tiles, expressions, arithmetic, sections, many, words, header, emit, build (the same as Triton
source); kernels (which of them a device gets).
"""
