"""`python -m graphaccel` is `graphaccel`."""

import sys

from graphaccel.cli.main import main

sys.exit(main())
