"""`python -m graphaccel` is `graphaccel`."""

import sys

from graphaccel.cli import main

sys.exit(main())
