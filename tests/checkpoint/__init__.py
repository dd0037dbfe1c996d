"""Checkpoints, export and what they promise (docs/checkpoints.md)."""
