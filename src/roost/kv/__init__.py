"""KV pages: who owns each one, how long each sequence is, and what the prefix tree keeps."""
