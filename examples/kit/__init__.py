"""What the examples share besides the training loop: options, data, display, checkpoints.

Nothing here knows zerofx. The loops that do are in the example programs themselves.
"""
