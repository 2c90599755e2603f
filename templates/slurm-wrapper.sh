# Example of a script that starts every rank: bash runs this text, with the command of the rank in "$@". Use it to bind
# CPUs and to set variables that differ between ranks. LOCAL_RANK is the number of the rank on its node.
#
# If a job does not set cluster.slurm.wrapper (words, or the path of a file like this one), tula uses
# ~/.config/tula/slurm-wrapper.sh, or else /etc/tula/slurm-wrapper.sh. The text is copied into the job script.
#
# For example, use the network card nearest to each GPU, and the cores nearest to each card:
#
#   cards=(mlx5_0 mlx5_1 mlx5_2 mlx5_3)
#   export NCCL_IB_HCA="${cards[LOCAL_RANK]}"
#   exec numactl --cpunodebind="$LOCAL_RANK" --membind="$LOCAL_RANK" "$@"

# exec replaces the shell, so the rank receives signals directly and its exit code is kept.
exec "$@"
