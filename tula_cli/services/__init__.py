"""One file a command, and the Python API: orchestrate, yield events, never print, never exit."""
