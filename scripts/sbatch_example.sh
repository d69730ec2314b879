#!/usr/bin/env bash
# A Slurm job for a training script of your own. Copy it, set the lines below, and submit it from the
# folder of your code, with the environment active that has torch and torchdistpackage:
#
#     sbatch -p PARTITION -A ACCOUNT scripts/sbatch_example.sh my_script.py --options of=it
#
# Without arguments it runs examples/own_loop_ddp.py. What a YAML file describes needs no script: `tdp submit`.

#SBATCH --job-name=own-script
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2         # one task is one rank: as many as a node has GPUs
##SBATCH --gpus-per-node=2          # one # less where there are GPUs
#SBATCH --cpus-per-task=1           # for data loading, commonly the CPUs of a node over its GPUs
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append          # a requeued job goes on in the same log
#SBATCH --requeue                   # your script resumes from its newest checkpoint

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
# module load cuda                  # and what else your site asks for
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

if ! command -v srun >/dev/null; then # `dirname "$(command -v srun)"` on the login node says where it is
    echo "$(hostname) finds no srun; write above: export PATH=\"\$PATH:FOLDER\", with the folder of srun" >&2
    exit 1
fi

# setup_distributed() finds rank, world size, address and port in Slurm's own variables.
# --cpus-per-task: srun does not take it over from sbatch. --kill-on-bad-exit: one failed rank ends all.
exec srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 --label \
    python "${@:-examples/own_loop_ddp.py}"
