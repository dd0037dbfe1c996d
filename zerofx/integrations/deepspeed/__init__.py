"""`ds_config.json` read, understood and put to work.

In the order in which data flows: read (a file to flat keys), key, training_keys, data_keys,
zero_keys and model_keys (what is known about each), settings (what a file asks for), schedules,
choices, dtypes, scaling, splitting, batch and translate (what that is in zerofx); indexed,
curriculum, draws, packing and sampling (which samples ranks take), routed and routing (which tokens
layers see); monitors, operations, modules and flops (what programs compute), calls and comms (what
they send), report, by the clock; gradients (what they must be), table and understood (what a file
asks for), and recipe (what one trains with). `__main__` shows a file, or all keys.
"""

from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.translate import from_deepspeed

__all__ = ["Recipe", "from_deepspeed"]
