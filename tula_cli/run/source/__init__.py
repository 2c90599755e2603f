"""Which files are the user's own code: those behind import strings, and those of a script."""
