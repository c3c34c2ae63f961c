"""The executor of steps: launch, collect, and what runs in between."""
