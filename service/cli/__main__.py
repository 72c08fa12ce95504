"""`python -m torpor.service.cli`, the same as `torpor`."""

import sys

from torpor.service.cli.main import main

sys.exit(main())
