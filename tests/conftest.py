"""Shared by all tests: a cache for embedded models, so that they are built once and never in the user's own cache."""

import gc
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import blocked
import hypothesis
import pytest

hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)  # the same examples in every run
hypothesis.settings.load_profile("suite")
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several add up in another order
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
BLOCKED = os.environ.get(blocked.VARIABLE) == "1"
HERE = Path(__file__).parent
EMBEDDED_RUNS = ["distributed", "faults", "simulated"]
GONE = {each.name for each in HERE.glob("plugins/*/")} - {
    each.parent.name for each in HERE.parent.glob("lightrft_visual/plugins/*/__init__.py")
}
collect_ignore = [f"plugins/{name}" for name in GONE]  # the tests of plug-ins that are deleted, as their folders are
if not (HERE.parent / "lightrft_visual/plugins/embedded/__init__.py").exists():
    collect_ignore += [f"plugins/unified/test_{name}.py" for name in ("descriptions", "tiny_janus")] + EMBEDDED_RUNS
if BLOCKED:
    blocked.block()
    collect_ignore = ["plugins", *EMBEDDED_RUNS]


# Whole runs, engines and compiled programs: minutes each, or seconds for every family.
SLOW = (
    "distributed/", "faults/", "simulated/", "extension/", "plugins/ray/", "rollout/vllm/",
    "runtime/test_precision.py", "runtime/test_presence.py",
    "runtime/test_zero3_loading.py", "runtime/test_port.py",
    "models/diffusion/test_compile.py", "models/diffusion/test_context_parallel.py",
    "models/diffusion/test_families.py", "models/vlm/test_sequence.py",
    "models/vlm/test_proven.py", "plugins/memory_plan/test_plans.py", "plugins/memory_plan/test_checkpointing.py",
    "plugins/memory_plan/test_sizes.py", "trainer/features/test_compiled_blocks.py",
    "plugins/embedded/test_shape_judge.py", "plugins/embedded/test_warmup_drawing.py",
    "plugins/unified/test_tiny_janus.py", "observe/report/test_browser.py", "scripts/", "examples/",
)  # fmt: skip
# Begun first, the longest before the others: what begins last should be short, as one worker waits for it alone.
LONGEST = (
    "distributed/test_bad_rows.py", "distributed/test_diffusion_runs.py", "simulated/test_runs.py",
    "faults/test_lost_ranks.py", "plugins/ray/rollout/test_split_runs.py", "distributed/test_two_experts.py",
    "faults/test_kill_points.py", "models/vlm/test_sequence.py", "scripts/test_gpu_kit_commands.py",
    "rollout/vllm/test_families.py", "plugins/ray/test_reward_pool.py",
)  # fmt: skip
# The other files of `distributed` read the runs of its conftest, which are started once.
OWN_RUNS = ("test_batch_statistics.py", "test_diffusion_runs.py", "test_two_experts.py")


def path_of(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


def is_slow(path: str) -> bool:
    return path.startswith(SLOW) or path.endswith("_runs.py")


def turn(item: pytest.Item) -> int:
    """The place of a test's file in the order in which files are begun."""
    path = path_of(item)
    return LONGEST.index(path) if path in LONGEST else len(LONGEST) + (not is_slow(path))


def pytest_itemcollected(item):
    """Marks what lies in a folder of slow tests, and the files of whole runs; before pytest looks at marks for `-m`."""
    if is_slow(path_of(item)):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # pytest itself orders tests by their fixtures
def pytest_collection_modifyitems(items):
    """Puts the longest files in front."""
    items.sort(key=turn)


def pytest_collection_finish():
    """The collector of garbage leaves alone what is imported by now, which took it a tenth of the tests' time."""
    _leave_alone()
    if loop := sys.modules.get("lightrft_visual.trainer.loop"):
        loop.start_up_objects_aside = nullcontext  # whose end undoes that; what it does has tests of its own


@pytest.fixture(scope="module", autouse=True)
def _imports_left_alone():
    """Also after tests of what undoes it."""
    yield
    if gc.get_freeze_count() < left_alone:
        _leave_alone()


def _leave_alone() -> None:
    global left_alone
    gc.collect()
    gc.freeze()
    left_alone = gc.get_freeze_count()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Tests marked `plugin` need theirs. A fixture that asks for one that is blocked or deleted skips its tests."""
    for mark in item.iter_markers("plugin"):
        pytest.importorskip(f"{blocked.ROOM}.{mark.args[0]}")
    return (yield from _skipped_without_plugin())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that asks for a plug-in that is blocked or deleted is skipped."""
    return (yield from _skipped_without_plugin())


def _skipped_without_plugin():
    try:
        return (yield)
    except Exception as error:
        folder = Path(__file__).parents[1] / str(error).rpartition(": ")[2]  # that is not there, as the message ends
        if type(error).__name__ == "PluginMissing" and (BLOCKED or not folder.is_dir()):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def cache_root(tmp_path_factory) -> Path:
    """Folder of embedded data and models for this session and all its workers; also set for child processes."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    root = Path(os.environ.get("LIGHTRFT_CACHE") or shared / "lightrft_cache")
    os.environ["LIGHTRFT_CACHE"] = str(root)
    return root


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share runs or a loaded engine stay in one worker: those of a file, and of files with the same runs."""
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerAFile(LoadScopeScheduling):
        def remove_node(self, node):
            """Of a worker that died, only files with tests left go back to the queue: another worker would be given an
            empty file for each of the others, would never report on it, and would wait for ever."""
            files = self.assigned_work[node]
            for file in [file for file, tests in files.items() if all(tests.values())]:
                del files[file]
            return super().remove_node(node)

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "distributed" if file.startswith("tests/distributed/") and not file.endswith(OWN_RUNS) else file

    return OneWorkerAFile(config, log)
