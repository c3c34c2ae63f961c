"""Scheduling: queue, admission, planner, settle and the loop that joins them; host only."""
