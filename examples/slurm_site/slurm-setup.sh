# What is put before every job that has no cluster.setup of its own: as /etc/tula/slurm-setup.sh for a site, as
# ~/.config/tula/slurm-setup.sh for a user.
set -e
module purge
module load cuda nccl
