"""The KV cache on the host: who owns each page, how long each sequence is, and what the prefix cache keeps."""
