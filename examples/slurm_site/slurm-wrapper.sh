# Starts every rank, with its command in "$@". Copy it to /etc/tula/slurm-wrapper.sh (all users) or
# ~/.config/tula/slurm-wrapper.sh (one user). It binds each rank to the cores and memory nearest to its GPU, and to the nearest
# network card.

cards=(mlx5_0 mlx5_1 mlx5_2 mlx5_3)
export NCCL_IB_HCA="${cards[LOCAL_RANK]}"
exec numactl --cpunodebind="$LOCAL_RANK" --membind="$LOCAL_RANK" "$@"
