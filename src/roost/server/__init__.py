"""Server: HTTP in front, the engine in a process of its own behind; needs the server's packages."""
