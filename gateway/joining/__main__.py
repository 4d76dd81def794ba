"""`python -m gateway.joining`: the join service."""

import sys

from gateway.joining.service import main

sys.exit(main())
