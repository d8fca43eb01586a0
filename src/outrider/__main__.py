"""`python -m outrider`: the command line, where no script is installed."""

import sys

from outrider.cli import main

sys.exit(main())
