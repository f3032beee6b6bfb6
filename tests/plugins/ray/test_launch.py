"""What a worker of Ray Train gives the rank beside it, and how a launch ends that cannot be."""

import os
import sys
from types import SimpleNamespace

import pytest

from lightrft_visual.plugins.ray import launch as launch_ray
from lightrft_visual.runtime import collectives

SCRIPT = """
import os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "RAY_ADDRESS")
assert int(os.environ["LIGHTRFT_STARTED_BY"]) == os.getppid()
pathlib.Path("told").write_text(" ".join(os.environ[name] for name in names))
sys.exit(int(sys.argv[1]))
"""


def test_a_rank_is_told_its_place_and_its_failure_is_the_runs(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    numbers = {"world_rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2}
    context = SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in numbers.items()})
    monkeypatch.setattr("ray.train.get_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.9")
    monkeypatch.setattr(collectives, "broadcast_object", lambda own: ("10.0.0.1", 4000))  # rank 0's
    (tmp_path / "run.py").write_text(SCRIPT)
    run = {"command": ["run.py", "0"], "folder": str(tmp_path), "address": "10.0.0.1:6379"}
    launch_ray.start_rank(run)
    assert (tmp_path / "told").read_text() == "3 4 1 2 10.0.0.1 10.0.0.1:6379"
    with pytest.raises(RuntimeError, match="rank 3 ended with exit code 7"):
        launch_ray.start_rank(run | {"command": ["run.py", "7"]})


def test_more_ranks_than_devices_are_refused_and_a_failure_is_an_exit_code(monkeypatch, capsys):
    pytest.importorskip("ray.train")
    fake = SimpleNamespace(cluster_resources=lambda: {"GPU": 2.0})
    monkeypatch.setattr(launch_ray, "connect", lambda *_, **__: fake)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["launch_ray", "--ranks", "3", "run.py"])
    with pytest.raises(SystemExit) as ended:
        launch_ray.main()
    assert os.environ["RAY_TRAIN_V2_ENABLED"] == "1"  # before ray.train is imported
    assert ended.value.code == 1 and "3 ranks were asked for, the Ray cluster has 2 GPU(s)" in capsys.readouterr().err
    fake.cluster_resources = lambda: {"CPU": 2.0}
    with pytest.raises(SystemExit):
        launch_ray.main()
    assert "3 ranks of 1 CPU were asked for, the Ray cluster has 2: --cpus_per_rank" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["launch_ray", "--ranks", "0", "run.py"])  # not as many as there are GPUs
    with pytest.raises(SystemExit):
        launch_ray.main()
    assert "argument --ranks: it is 1 or more" in capsys.readouterr().err


def test_ranks_have_what_networks_trackers_and_named_tokens_need(monkeypatch):
    given = {"NCCL_IB_HCA": "mlx5", "WANDB_API_KEY": "key", "MY_TOKEN": "secret", "OTHER_TOKEN": "other", "HOME": "/me"}
    monkeypatch.setattr(os, "environ", given)
    for command in (["run.py", "--reward_token_env", "MY_TOKEN"], ["run.py", "reward.reward_token_env=MY_TOKEN"]):
        handed = launch_ray.environment_of_ranks(command)["env_vars"]
        assert handed.pop("PYTHONPATH") and handed == {name: given[name] for name in list(given)[:3]}
