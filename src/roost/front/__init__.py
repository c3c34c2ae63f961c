"""Front: between people's words and the engine's tokens; used by the server, the library and the command line."""
