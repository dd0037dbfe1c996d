"""Commands that measure zerofx: `python -m benchmarks.<name>`."""
