"""Unit tests: each module's promises alone, in folders that mirror the source."""
