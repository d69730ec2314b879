#!/usr/bin/env bash
# Submit what a YAML file describes, in an environment of its own:
#
#     scripts/submit.sh configs/gpt_slurm.yaml [section.key=value ...] [--dry-run] [--follow] [--sweep ...]
#
# The same as `tdp submit`, from any folder; paths are relative to the folder it is called in.

source "$(dirname "$(readlink -f "$0")")/env"
exec "$root/.venv/bin/tdp" submit "$@"
