"""Checkpoints that all tests of models read."""

import pytest


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Where `checkpoint_of` writes each tiny checkpoint once. Nobody changes them: damage is done to copies."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    """The checkpoint of a mixture of experts."""
    from moe import moe_checkpoint

    return moe_checkpoint(tmp_path_factory.mktemp("moe"))
