"""The replay buffer under the import path that LightRFT's users know; the code is in `lightrft_visual.experience`."""

from ..experience.buffer import NaiveReplayBuffer

__all__ = ["NaiveReplayBuffer"]
