"""What tests of engines share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Where `checkpoint_of` keeps its checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")
