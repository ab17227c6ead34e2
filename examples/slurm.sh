#!/bin/bash
# Two nodes of eight GPUs, one process a GPU. The mesh of the config must have 16 devices, such as
# [mesh] axes = { node = 2, gpu = 8 }. train.run_dir must be on a file system that all nodes share.
#SBATCH --job-name=jaxmoe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
# 120 s before the end, SLURM sends SIGTERM: the run saves, and the same command with --resume goes on.

set -euo pipefail
CONFIG=${1:?usage: sbatch examples/slurm.sh CONFIG [options of jaxmoe train]}
srun jaxmoe train "$CONFIG" "${@:2}"
