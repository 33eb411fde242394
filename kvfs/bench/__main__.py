"""python -m kvfs.bench"""

import sys

from kvfs.bench.run import main

sys.exit(main())
