"""Scripts of others, jobs for them, and data that they read."""
