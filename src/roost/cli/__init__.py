"""Command line: `roost serve | chat | generate | pull | doctor | bench`."""
