"""Installing: what is asked for can be had, what is built is whole, and `make` says what it can do."""
