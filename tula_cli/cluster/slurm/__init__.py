"""SLURM: submission of jobs, queries of their states, and resources of a site."""
