"""Environments of learning_turns.sh, by path."""

from lightrft_visual.plugins.embedded.zoom import EmbeddedZoomOfAnother, EmbeddedZoomOfNothing

__all__ = ["EmbeddedZoomOfAnother", "EmbeddedZoomOfNothing"]
