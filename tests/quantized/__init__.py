"""Quantized gathers and reductions (qwZ and qgZ) on real ranks."""
