#!/bin/bash
#SBATCH --job-name=quantize
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
# sbatch recipes/cluster/slurm.sh MODEL --method gptq --calibration TEXT --output OUT
#
# All paths are on a file system that the machines share. A job that goes back into the queue goes on where it was
# (--resume); submit it again after a machine was lost, on as many as there are.
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:${PORT:-29500}" \
  -m compress quantize "$@" --fsdp --resume
