#!/usr/bin/env bash
# Sets everything up, checks style and types, and runs the tests, in LIGHTRFT_TEST_WORKERS (2) processes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
LIGHTRFT_TESTS=1 bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # else hundreds of processes would each compile the whole package
ruff check .
ruff format --check .
mypy
exec python -m pytest --numprocesses "${LIGHTRFT_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
