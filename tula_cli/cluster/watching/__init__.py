"""Which supervisor looks at the run directory, when, and how the others of its node hear of it."""
