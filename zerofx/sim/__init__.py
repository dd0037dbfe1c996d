"""Referees that need no hardware. Modules: shares, memory, lockstep, codes, quantized, timeline.

Shares nothing with the runtime, so that each can be checked against the other.
"""
