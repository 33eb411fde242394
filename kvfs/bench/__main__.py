"""python -m kvfs.bench"""

import sys

from kvfs.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
