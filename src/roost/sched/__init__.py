"""The scheduler: queue, admission, planner, settle, and the loop of continuous batching that joins them; host only."""
