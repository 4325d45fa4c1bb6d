"""The indexer."""
