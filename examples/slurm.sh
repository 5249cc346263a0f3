#!/bin/bash
# A Slurm job on two machines that resumes itself: sbatch examples/slurm.sh
#
# `echelon submit slurm --nodes 2 --gpus_per_node 8 --time 12:00:00 --dry_run train.py` prints a script like this one, for your
# own options; without --dry_run, it submits it (docs/clusters.md). Submit this one from the folder that contains examples/. That
# folder must be shared by the machines; adapt the lines below to your cluster, and activate your environment before srun.
#SBATCH --job-name=elastic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@60
#SBATCH --requeue
# For GPUs, add the line `#SBATCH --gpus-per-node=8`, and call this script with LAUNCH_ARGS='--nproc_per_node 8'.

launch_args=${LAUNCH_ARGS:---cpu --nproc_per_node 2}
folder=${SLURM_SUBMIT_DIR:-$PWD}/outputs/slurm-$SLURM_JOB_ID  # checkpoints; the same folder after a requeue
mkdir -p "$folder"

# The launchers on the machines share a secret: a new one at each start, readable by you only.
unset ECHELON_TOKEN
ECHELON_TOKEN_FILE=$(mktemp "$folder/.token-XXXXXXXX") || exit
export ECHELON_TOKEN_FILE
trap 'rm -f -- "$ECHELON_TOKEN_FILE"' EXIT
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$ECHELON_TOKEN_FILE"

# With a trap, this script goes on when Slurm ends the job with SIGTERM, so that the ranks have the time to save.
ended=
trap 'ended=yes' TERM

# One launcher per machine. It gets the machines, their ranks and the rendezvous host from Slurm.
# shellcheck disable=SC2086  # launch_args are several words
srun --kill-on-bad-exit=0 --ntasks-per-node=1 --wait=0 \
    echelon launch $launch_args examples/elastic_resume.py --folder "$folder" "$@"
code=$?

# 143: all ranks have saved at the same step, because the time limit is near. The next start resumes from there.
if [ "$code" -eq 143 ] && [ -z "$ended" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
