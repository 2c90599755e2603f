"""Third-party scripts, jobs for them, and their data."""
