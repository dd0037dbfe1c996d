"""zerofx for programs that were written for other libraries. Packages: deepspeed."""
