# Runs around every rank, with the rank's command as "$@": as /etc/tula/slurm-wrapper.sh for a site, as
# ~/.config/tula/slurm-wrapper.sh for a user. Here each rank is kept to the cores and the memory beside its GPU, and uses the
# network card that is nearest.

cards=(mlx5_0 mlx5_1 mlx5_2 mlx5_3)
export NCCL_IB_HCA="${cards[LOCAL_RANK]}"
exec numactl --cpunodebind="$LOCAL_RANK" --membind="$LOCAL_RANK" "$@"
