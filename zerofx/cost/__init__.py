"""Numbers: what communication and kernels cost. Modules: comm, tables, compute."""
