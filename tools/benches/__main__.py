"""python -m benches"""

import sys

from benches import main
from kvfs.cli.command import guarded

sys.exit(guarded(lambda: main(sys.argv[1:])))
