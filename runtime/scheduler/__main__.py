"""`python -m runtime.scheduler`: the scheduler process."""

import sys

from runtime.scheduler.controller import main

sys.exit(main())
