# Example of shell lines that run at the start of every SLURM job, once per job.
#
# If a job does not set cluster.setup (lines, or the path of a file like this one), tula uses
# ~/.config/tula/slurm-setup.sh, or else /etc/tula/slurm-setup.sh. `tula profile --dry-run` shows which one. The text is
# copied into the job script, so later edits do not affect submitted jobs.

# Without this line, the job continues if a line fails.
set -e

# module purge
# module load cuda/12.4 nccl
# source "$HOME/venvs/train/bin/activate"

# export NCCL_IB_HCA=mlx5
