"""zerofx beside its peers: `python -m benchmarks.compare`.

Each contender trains the same model on the same data in processes of its own, and all of them are
timed in turns.

- `contenders`: who takes part, and how each is set up.
- `zoo`, `layers`: the models.
- `trial`: one contender, measured.
- `rounds`: trials of all contenders, in turns.
- `figures`: medians, ratios, and whether losses agree.
- `display`: table and plot.
"""
