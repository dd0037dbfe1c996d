"""zeroN against DDP and `fully_shard`: the same losses, norms, parameters and buffers."""
