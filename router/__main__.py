"""`python -m rankway.router`."""

from __future__ import annotations

import sys

from rankway.router.processes import main

if __name__ == "__main__":
    sys.exit(main())
