# Runs as the parent of every rank, in bash, with the rank's command as "$@": the place to bind CPUs and to set what
# differs from rank to rank. LOCAL_RANK is the rank on its node.
#
# It is used only when asked for: by a file of the site's, /etc/tula/slurm-wrapper.sh, or of the user's,
# ~/.config/tula/slurm-wrapper.sh, or by cluster.slurm.wrapper_snippet. The text is part of the job's script.
#
# For example the network card beside each GPU, and the cores beside each card:
#
#   cards=(mlx5_0 mlx5_1 mlx5_2 mlx5_3)
#   export NCCL_IB_HCA="${cards[LOCAL_RANK]}"
#   exec numactl --cpunodebind="$LOCAL_RANK" --membind="$LOCAL_RANK" "$@"

# The last line replaces the shell: signals and the exit code are then the rank's own.
exec "$@"
