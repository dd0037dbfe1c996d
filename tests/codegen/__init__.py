"""Kernels: what they mean, and that Triton source says the same."""
