#!/usr/bin/env bash
# The first visit to a GPU: engines, parity, speed and memory of one card, as one markdown table.
#   bash scripts/gpu/check.sh [--out DIR] [--only PART,PART] [--size real|tiny] [--docs PAGE] [--list]
#   bash scripts/gpu/check.sh --ranks N [--hostfile F]      several cards, or several hosts
# Each part has its own time limit and leaves a file in DIR; a part that is done is not run again, so that several
# short visits add up. LIGHTRFT_GPU_PYTHON names an interpreter that has everything already (no set-up is made then).
# --list needs no set-up.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${LIGHTRFT_GPU_PYTHON:-}
case " $* " in *" --list "*) python=${python:-python3} ;; esac
if [ -z "$python" ]; then
  bash scripts/setup.sh
  python=.venv/bin/python
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" scripts/gpu/check.py "$@"
