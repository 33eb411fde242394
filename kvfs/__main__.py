"""`python -m kvfs`: the command line."""

import sys

from kvfs.cli import main

if __name__ == "__main__":
    sys.exit(main())
