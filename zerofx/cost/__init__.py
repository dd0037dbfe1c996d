"""Numbers: what communication costs. Modules: comm."""
