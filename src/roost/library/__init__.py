"""The engine as a library in one process: `roost.LLM`, sessions, batches of prompts."""
