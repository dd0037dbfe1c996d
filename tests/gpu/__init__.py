"""Tests that need a CUDA device; they skip themselves where there is none."""
