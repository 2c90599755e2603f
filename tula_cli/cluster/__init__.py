"""Jobs: how they are started, supervised and relaunched."""
