"""`python -m roost`: the command line.

Nothing else lives here. Called by Python.
"""

import sys

from roost.cli.main import main

sys.exit(main())
