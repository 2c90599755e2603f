"""One module per command, and the Python API. Services orchestrate and yield events; they never print or exit."""
