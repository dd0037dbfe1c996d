"""Looking at what was dumped. Reads files only; needs no model and no ranks. Modules: compare."""
