"""`python -m graphaccel` runs the `graphaccel` command."""

import sys

from graphaccel.cli.main import main

sys.exit(main())
