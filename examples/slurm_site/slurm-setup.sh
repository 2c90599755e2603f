# Runs at the start of every job that does not set cluster.setup. Copy it to /etc/tula/slurm-setup.sh (all users) or
# ~/.config/tula/slurm-setup.sh (one user).
set -e
module purge
module load cuda nccl
