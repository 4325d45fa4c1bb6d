"""`python -m rankway.registry`: one registry replica."""

from __future__ import annotations

import sys

from rankway import service
from rankway.registry.service import run
from rankway.registry.settings import RegistrySettings

if __name__ == "__main__":
    sys.exit(service.main("registry", RegistrySettings, run))
