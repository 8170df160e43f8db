"""``python -m reproduction``."""

import sys

from reproduction.command import main

sys.exit(main())
