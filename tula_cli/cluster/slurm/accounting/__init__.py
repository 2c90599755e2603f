"""What SLURM counts for a job and holds against an account: asked by scontrol, sacctmgr, sshare and sacct."""
