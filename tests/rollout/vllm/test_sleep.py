"""In which order vLLM is told to sleep, wake and load, as on an accelerator, and what it leaves of the process."""

import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.errors import RolloutError
from lightrft_visual.rollout import resident
from lightrft_visual.rollout.vllm import engine as vllm_engine
from lightrft_visual.rollout.vllm.arguments import VLLMSettings
from lightrft_visual.rollout.vllm.engine import VLLMEngine

EMPTIED = 77  # numbers that memory comes back with


class Runner:
    """vLLM's runner of a model."""

    __module__ = "vllm.v1.worker"

    def __init__(self):
        self.model = torch.nn.Module()

    def get_model(self):
        return self.model


class ToldLLM:
    """Notes what vLLM's `LLM` is told. As vLLM 0.26 on CUDA, it cannot take back what is there, and sleeps only as a
    whole."""

    def __init__(self):
        self.told, self.let_go = [], set()
        self.worker = SimpleNamespace(model_runner=Runner())
        self.emptied = []  # how often it had been told something when PyTorch's cache was emptied
        config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen2_vl"))
        core = SimpleNamespace(shutdown=lambda: self.told.append("shut down"))
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None, model_config=config, engine_core=core)

    def sleep(self, level):
        assert not self.let_go
        self.told.append(f"sleep {level}")
        if level == 2:
            for memory in getattr(self, "memory", ()):
                memory.fill_(EMPTIED)
        self.let_go = {"weights", "kv_cache"}

    def wake_up(self, tags=None):
        for each in tags or ("weights", "kv_cache"):
            self.let_go.remove(each)
        self.told.append(f"wake {'all' if tags is None else ','.join(tags)}")

    def collective_rpc(self, called, kwargs=None):
        if callable(called):
            called(self.worker)
        else:
            self.told.append(called)

    def apply_model(self, function):
        pass

    def reset_prefix_cache(self):
        self.told.append("reset")

    def reset_mm_cache(self):
        pass

    def generate(self, prompts, params, use_tqdm):
        self.told.append("generate")
        return []


@pytest.fixture
def engine(monkeypatch):
    made = VLLMEngine.__new__(VLLMEngine)
    made.settings, made.enable_sleep, made.llm = VLLMSettings("model", 64), True, ToldLLM()
    device = SimpleNamespace(
        device_name=lambda: "cuda",
        empty_cache=lambda: made.llm.emptied.append(len(made.llm.told)),
        current_device=lambda: 5,
        current_stream=lambda: None,
        stream=nullcontext,
    )
    made.free = 60  # of 100, where it takes 50
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (made.free, 100))
    monkeypatch.setattr(resident, "get_accelerator", lambda: device)
    monkeypatch.setattr(vllm_engine, "get_accelerator", lambda: device)
    return made


def test_with_its_weights_it_wakes_whole(engine):
    engine.sleep()
    engine.sleep()
    engine.wake()
    engine.wake()
    engine._run([{}], [None])
    assert engine.llm.told == ["sleep 1", "wake all", "generate"]
    assert engine.llm.emptied == [1]


@pytest.mark.parametrize("woken", [True, False], ids=["by wake", "by generate"])
def test_without_them_room_for_weights_comes_first_and_the_kv_cache_when_the_load_has_returned(engine, woken):
    engine.sleep(keep_weights=False)
    engine.wake()
    engine.wake()
    with pytest.raises(RolloutError, match="call update_weights before"):
        engine._run([{}], [None])
    engine.update_weights([])
    engine.update_weights([])  # no room for the cache is needed to load once more
    assert engine.llm.told == ["sleep 2", "wake weights", *["reload_weights", "reset"] * 2]
    if woken:
        engine.wake()
        assert engine.llm.told[6:] == ["wake kv_cache"]
    engine._run([{}], [None])
    assert engine.llm.told[6:] == ["wake kv_cache", "generate"]
    assert engine.llm.emptied == [1, 6]
    engine.update_weights([])
    assert engine.llm.told[8:] == ["reload_weights", "reset"]


def test_what_lies_beside_the_weights_comes_back_with_their_memory(engine, monkeypatch):
    """As Qwen3-VL's room for features of its vision tower: a list of tensors, which vLLM does not keep as buffers."""
    runner = engine.llm.worker.model_runner
    model, runner.positions = runner.model, torch.arange(3)
    model.inner = torch.nn.Linear(2, 2)
    model.inner.room, model.inner.scales = [torch.zeros(3), torch.ones(2)], {"scale": torch.full((2,), 3.0)}
    elsewhere = model.cache = torch.zeros(4)  # as of a KV cache
    beside = [*model.inner.room, model.inner.scales["scale"], runner.positions]
    engine.llm.memory = [*beside, elsewhere, model.inner.weight.data]
    place = {
        each: SimpleNamespace(handle=(0, each.nbytes, each.data_ptr(), 7), tag="weights") for each in engine.llm.memory
    }
    place[elsewhere].tag = "kv_cache"
    data = {each.handle[2]: each for each in place.values()}
    allocator = SimpleNamespace(instance=SimpleNamespace(pointer_to_data=data))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(CuMemAllocator=allocator))
    for _ in range(2):
        engine.sleep(keep_weights=False)
        assert all((each.int() == EMPTIED).all() for each in engine.llm.memory)
        engine.update_weights([])
        assert [each.tolist() for each in beside] == [[0.0] * 3, [1.0] * 2, [3.0] * 2, [0, 1, 2]]
        assert (elsewhere == EMPTIED).all() and (
            model.inner.weight == EMPTIED
        ).all()  # whose numbers come from elsewhere
        engine.wake()


def test_weights_that_it_kept_while_it_sleeps_are_given_up_for_new_ones(engine):
    engine.sleep()
    engine.sleep(keep_weights=False)
    engine.sleep(keep_weights=False)
    engine.wake()
    with pytest.raises(RolloutError, match="call update_weights before"):
        engine._run([{}], [None])
    engine.update_weights([])
    engine.wake()
    assert engine.llm.told == ["sleep 1", "wake weights", "reload_weights", "reset", "wake kv_cache"]


def test_a_load_wakes_and_weights_that_were_not_loaded_are_not_taken_for_kept_ones(engine):
    engine.sleep(keep_weights=False)
    engine.wake()
    engine.sleep()  # before anything was loaded
    assert engine.lacks_weights
    engine.update_weights([])
    assert engine.llm.told[2:] == ["wake kv_cache", "sleep 1", "wake weights", "reload_weights", "reset"]
    engine._run([{}], [None])
    assert engine.llm.told[-2:] == ["wake kv_cache", "generate"]


@pytest.mark.parametrize("free, told", [(60, ["sleep 1", "wake all", "shut down"]), (40, ["sleep 1", "shut down"])])
def test_a_sleeping_engine_wakes_before_it_is_closed_where_there_is_room(engine, free, told):
    engine.free = free
    engine.sleep()
    engine.close()
    assert engine.llm.told == told


def test_an_engine_without_its_cache_takes_that_back_before_it_is_closed_and_one_that_may_not_sleep_nothing(engine):
    engine.enable_sleep = False
    engine.sleep(keep_weights=False)
    engine.close()
    assert engine.llm.told.pop() == "shut down" and not engine.llm.told
    engine.enable_sleep = True
    engine.sleep(keep_weights=False)
    engine.wake()
    engine.close()
    assert engine.llm.told == ["sleep 2", "wake weights", "wake kv_cache", "shut down"]


@pytest.fixture
def built(engine, monkeypatch):
    """Builds it with a stand-in of vLLM's `LLM`."""
    for name, made in (("engine_arguments", {}), ("checked", (True, False)), ("sampling_rules", None)):
        monkeypatch.setattr(vllm_engine, name, lambda *_, made=made: made)

    def build(llm):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm))
        return engine._build()

    return build


def test_an_engine_leaves_the_trainer_its_threads(built):
    """vLLM 0.32 keeps one of its worker's process on CUDA, which is the trainer's."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        built(lambda **_: torch.set_num_threads(1))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_engine_leaves_the_trainer_its_stream(built, monkeypatch):
    """vLLM gives a thread that has chosen none another one, where it asks for it on CUDA."""
    from vllm import platforms
    from vllm.utils import torch_utils

    def choose(stream):
        here.now = stream

    here, device = SimpleNamespace(now="default"), vllm_engine.get_accelerator()
    monkeypatch.setattr(torch_utils, "prev_set_stream", choose)
    monkeypatch.setattr(torch.cuda, "set_stream", torch_utils._patched_set_stream)  # an engine on the CPU replaces it
    monkeypatch.setattr(torch_utils, "_current_stream_tls", SimpleNamespace())
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda other: None, device=0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: here.now)

    @contextmanager
    def stream(chosen):  # as PyTorch's
        before = here.now
        torch.cuda.set_stream(chosen)
        yield
        torch.cuda.set_stream(before)

    device.current_stream, device.stream = torch.cuda.current_stream, stream
    built(lambda **_: torch_utils.current_stream())
    assert torch_utils.current_stream() == here.now == "default"


@pytest.mark.parametrize("fails", [False, True])
def test_the_number_of_threads_can_be_set_after_an_engine_was_built_or_failed(built, monkeypatch, fails):
    """vLLM 0.32's worker on CPU replaces the function by one that does nothing."""
    own = torch.set_num_threads

    def replace(**_):
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
        if fails:
            raise RuntimeError

    with pytest.raises(RolloutError) if fails else nullcontext():
        built(replace)
    assert torch.set_num_threads is own


def test_an_engine_is_built_where_an_earlier_ones_memory_was_freed_while_it_slept(built, monkeypatch):
    """As in csrc/cumem_allocator.cpp: an error stays, nothing is given, and a call that raises clears it."""
    left, device = [], vllm_engine.get_accelerator()
    device.empty_cache = lambda: left.append("invalid argument")  # where asleep memory of the earlier one is freed

    def create_and_map(handle):
        assert handle == (5, 0, 0, 0)
        raise RuntimeError(f"CUDA Error: {left.pop()}")

    def loaded(**_):
        assert not left, "no memory"
        return "llm"

    cumem = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=object()), create_and_map=create_and_map)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cumem)
    assert built(loaded) == "llm"
    cumem.CuMemAllocator.instance, device.empty_cache = None, lambda: None  # of a process's first engine there is none
    assert built(loaded) == "llm"
