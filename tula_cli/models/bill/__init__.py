"""What a site's SLURM counts for a job: the billing of its resources, and what of it the balance of an account can carry."""
