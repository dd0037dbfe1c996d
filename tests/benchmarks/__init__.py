"""Tests of the programs that measure; they measure nothing themselves."""
