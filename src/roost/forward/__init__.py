"""The forward passes of a step: how rows lie in a flat batch, draft and target forward, accept and extend."""
