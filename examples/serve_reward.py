"""Serve a scorer or a callable over HTTP; the same as `lightrft-visual serve-reward`.

    python examples/serve_reward.py --scorer exact --port 0

docs/rewards.md says how; --help lists the settings.
"""

import sys

from lightrft_visual.serve_reward import main

if __name__ == "__main__":
    sys.exit(main())
