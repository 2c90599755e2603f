# What is put before the set-up of every job, in place of tula's own: as /etc/tula/slurm-setup.sh for a site, as
# ~/.config/tula/slurm-setup.sh for a user. Begin with the lines of templates/slurm-setup.sh:

unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE
unset SLURM_MEM_BIND SLURM_MEM_BIND_LIST SLURM_MEM_BIND_TYPE SLURM_MEM_BIND_VERBOSE
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
export SLURM_EXPORT_ENV=ALL

# Then the site's own:
module purge
module load cuda nccl
