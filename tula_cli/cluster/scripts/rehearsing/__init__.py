"""How a script resumes, rehearsed by its supervisor."""
