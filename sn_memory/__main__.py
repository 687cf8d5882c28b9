"""`python -m sn_memory`: plan, check and report on the command line."""

import sys

from .cli.main import main

sys.exit(main(sys.argv[1:]))
