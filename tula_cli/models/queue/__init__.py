"""How long a job waits for its nodes: bounds from the waits of others, and what they make of a chain of jobs."""
