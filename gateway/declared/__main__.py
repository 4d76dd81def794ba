"""`python -m gateway.declared`: the controller."""

import sys

from gateway.declared.controller import main

sys.exit(main())
