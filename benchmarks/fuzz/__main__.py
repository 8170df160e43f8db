"""python -m benchmarks.fuzz: see the driver."""

import sys

from benchmarks.fuzz.driver import main

if __name__ == "__main__":
    sys.exit(main())
