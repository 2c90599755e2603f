"""SLURM: submitting, asking, and what a site offers."""
