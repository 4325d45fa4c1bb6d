"""`python -m rankway.indexer`: see --help."""

import sys

from rankway.indexer.service import run
from rankway.indexer.settings import IndexerSettings
from rankway.service import main

if __name__ == "__main__":
    sys.exit(main("indexer", IndexerSettings, run))
