"""Command line: `roost serve | chat | generate | pull | bench`."""
