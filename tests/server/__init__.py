"""A real server process: with the real default model, and with tiny ones that are meant to die."""
