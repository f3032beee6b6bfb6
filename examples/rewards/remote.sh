#!/usr/bin/env bash
# A remote reward: serve a scorer on this machine, train against it, stop it again.
#     bash examples/rewards/remote.sh [flags of train_grpo_vl.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"

log=$(mktemp)
python -m lightrft_visual serve-reward --scorer exact --port 0 >"$log" &
server=$!
trap 'kill $server 2>/dev/null; rm -f "$log"' EXIT
for _ in $(seq 300); do
  url=$(sed -n 's/^serving on //p' "$log")
  [ -n "$url" ] && break
  kill -0 $server
  sleep 0.2
done
deepspeed examples/train_grpo_vl.py --remote_rm_url "$url" "$@"
