"""`python -m runtime.node`: the node process."""

import sys

from runtime.node.runtime import main

sys.exit(main())
