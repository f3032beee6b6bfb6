"""The name of the shared memory that ranks of one tensor-parallel engine use on CPU."""

from __future__ import annotations

import secrets

from ...runtime import collectives


def use_private_name() -> None:
    """Give the engine built next a name of its own; all ranks of the run call this together.

    Under an external launcher vLLM has one name for every run of a host: two that start at once, or one that starts
    after another was killed while starting, fail with "create shm in SHMManager failed. errno: 17".
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    token = collectives.broadcast_object(secrets.token_hex(8))

    def group_name(communicator) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        return f"{token}-{communicator.unique_name}-{ranks}-cpushm"

    _CPUSHMDistributed.make_group_name = staticmethod(group_name)
