"""The run directory: paths, atomic writes, records, the code that was submitted."""
