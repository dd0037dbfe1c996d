"""`python -m zerofx` is the command `zerofx`."""

import sys

from zerofx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
