# An example of what is to run before every job on SLURM, on each of its nodes' behalf, in the script of the job.
#
# tula takes ~/.config/tula/slurm-setup.sh, else /etc/tula/slurm-setup.sh, where a job has no cluster.setup of its
# own (lines, or the path of a file like this one). `tula profile --dry-run` shows which was taken; the text is part of
# the script, so what was submitted is what runs.

# Without it a line that fails goes unnoticed.
set -e

# module purge
# module load cuda/12.4 nccl
# source "$HOME/venvs/train/bin/activate"

# export NCCL_IB_HCA=mlx5
