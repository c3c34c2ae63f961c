"""Tests of tools: their definitions, formats, grammars and machines."""
