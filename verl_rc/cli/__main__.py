"""``python -m verl_rc.cli``."""

import sys

from verl_rc.cli import main

sys.exit(main())
