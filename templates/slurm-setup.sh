# What tula puts before the set-up of every job on SLURM; cluster.slurm.setup comes after it.
#
# A site replaces it with /etc/tula/slurm-setup.sh, a user with ~/.config/tula/slurm-setup.sh, a job with
# cluster.slurm.setup_snippet. `tula profile --dry-run` shows which one was taken; the text is part of the script.

# Bindings of a job that tula itself was started in would pin every rank of this one to the same cores.
unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE
unset SLURM_MEM_BIND SLURM_MEM_BIND_LIST SLURM_MEM_BIND_TYPE SLURM_MEM_BIND_VERBOSE

# srun of SLURM 22.05 and later does not take --cpus-per-task over from sbatch.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# With `extra: {export: NONE}` srun would keep from the ranks what the set-up has made.
export SLURM_EXPORT_ENV=ALL
