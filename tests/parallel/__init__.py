"""Several ranks in processes of their own, over gloo: what they say, and what happens when one is lost."""
