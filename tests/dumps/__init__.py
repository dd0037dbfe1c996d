"""Dumps: texts, reports and files that run; the same on every run and rank."""
