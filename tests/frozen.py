"""Importing this leaves all objects there are out of later garbage collections.

The process that ranks are forked from imports it last. Otherwise each rank's first collection would
go through all of torch, and so copy most of its memory: half a second of a processor.
"""

import atexit
import gc

gc.collect()
gc.freeze()
# Some libraries look for leaks at the end of a process; ranks, which are forked, end without.
atexit.register(gc.unfreeze)
