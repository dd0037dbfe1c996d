"""Numbers: what communication and kernels cost. Modules: comm, compute."""
