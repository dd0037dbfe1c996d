"""Where models and batches of tests live: on the CPU, or where the ranks of `tests.gpu` compute."""

from __future__ import annotations

import os

DEVICE = os.environ.get("ZEROFX_TEST_DEVICE", "cpu")
