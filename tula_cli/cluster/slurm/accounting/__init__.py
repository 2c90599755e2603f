"""What SLURM counts for a job, holds against an account and has kept of waits: asked by scontrol, sacctmgr, sshare and sacct."""
