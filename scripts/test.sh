#!/usr/bin/env bash
# Sets everything up, checks style and types, and runs the tests, in LIGHTRFT_TEST_WORKERS (2) processes. Arguments
# go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
LIGHTRFT_TESTS=1 bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # else hundreds of processes would each compile the whole package
# Beside mypy, which takes one core: compiles what the tests import, which setup.sh leaves to them.
imports="import ray, lightrft_visual.trainer.diffusion.build, lightrft_visual.trainer.vl.trainer; from vllm import LLM"
timeout 600 python -c "$imports" >/dev/null 2>&1 &
ruff check .
ruff format --check .
mypy
wait
exec python -m pytest --numprocesses "${LIGHTRFT_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
