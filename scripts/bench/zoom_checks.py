"""Environments of learning.py, by path."""

from lightrft_visual.plugins.embedded.zoom import EmbeddedZoomOfAnother, EmbeddedZoomOfNothing

__all__ = ["EmbeddedZoomOfAnother", "EmbeddedZoomOfNothing"]
