"""The replay buffer under the import path that LightRFT's users know; the code is in `lightrft_visual.replay`."""

from ..replay.buffer import NaiveReplayBuffer

__all__ = ["NaiveReplayBuffer"]
