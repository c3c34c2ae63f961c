"""Command line: `roost serve | chat | generate | top | pages | pull | doctor | bench | …`."""
