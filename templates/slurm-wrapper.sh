# An example of what is to run around every rank: bash is started with this text and has the rank's command as "$@". It
# is the place to bind CPUs and to set what differs from rank to rank. LOCAL_RANK is the rank on its node.
#
# tula takes ~/.config/tula/slurm-wrapper.sh, else /etc/tula/slurm-wrapper.sh, where a job has no cluster.slurm.wrapper of
# its own (words, or the path of a file like this one). The text is part of the job's script.
#
# For example the network card beside each GPU, and the cores beside each card:
#
#   cards=(mlx5_0 mlx5_1 mlx5_2 mlx5_3)
#   export NCCL_IB_HCA="${cards[LOCAL_RANK]}"
#   exec numactl --cpunodebind="$LOCAL_RANK" --membind="$LOCAL_RANK" "$@"

# The last line replaces the shell: signals and the exit code are then the rank's own.
exec "$@"
