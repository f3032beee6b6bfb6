"""Versions of weights from one process to another: the bytes, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from worker_processes import TestedWorker, equal, named

from lightrft_visual.plugins.ray.rollout.worker import TORN
from lightrft_visual.rollout import weight_sync as weights
from lightrft_visual.rollout.vllm.engine import VLLMEngine
from lightrft_visual.rollout.weight_sync import MappedFiles, WeightPost, WeightsRefused, received, take_over


def same(found: list[tuple[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> bool:
    return equal(dict(found), wanted)


@pytest.mark.parametrize("stored", [False, True])
def test_versions_arrive_in_buckets(stored):
    kept = {}

    def store(content):
        kept[len(kept)] = content.copy()
        return len(kept) - 1

    post = WeightPost(bucket_bytes=200, store=store if stored else None, shared=not stored)
    first = post.post(named(1.0).items())
    second = post.post(named(2.0).items())
    assert (first.number, second.number) == (1, 2) and len(first.buckets) > 1
    assert sum(bucket.bytes for bucket in first.buckets) >= sum(tensor.nbytes for tensor in named().values())
    for posted, scale in ((first, 1.0), (second, 2.0)):
        assert same(received(posted, kept.__getitem__ if stored else None), named(scale))


def test_mapped_files_are_kept_and_a_larger_version_is_mapped_anew():
    post, files = WeightPost(), MappedFiles()
    for scale in (1.0, 2.0, 3.0, 4.0):
        assert same(received(post.post(named(scale).items()), files=files), named(scale))
    assert len(files._known) == post.turns
    larger = {name: tensor.repeat(3) if tensor.dim() == 1 else tensor for name, tensor in named(5.0).items()}
    larger["more"] = torch.arange(100_000.0)
    assert same(received(post.post(larger.items()), files=files), larger)


def test_on_another_host_the_trainers_path_may_be_of_something_else():
    kept = []
    post = WeightPost(store=lambda content: kept.append(content.copy()) or len(kept) - 1)
    posted, files = post.post(named().items()), MappedFiles()
    (bucket,) = posted.buckets
    assert weights.reachable(bucket.file) and not weights.reachable(replace(bucket.file, path="/proc/1/fd/99999"))
    elsewhere = replace(bucket, file=replace(bucket.file, path=weights.MemoryFile(64).at.path))
    assert not weights.reachable(elsewhere.file)
    assert same(received(replace(posted, buckets=(elsewhere,)), kept.__getitem__, files), named())
    assert not files._known  # it was fetched
    with pytest.raises(WeightsRefused, match="cannot be mapped: lightrft_weights_.* is not there"):
        received(replace(posted, buckets=(replace(elsewhere, stored=None),)), files=files)


def test_a_wrong_checksum_is_refused_and_nothing_is_taken_over():
    post, worker = WeightPost(bucket_bytes=200), TestedWorker()
    first = post.post(named(1.0).items())
    assert worker.load(first) == 1
    second = post.post(named(2.0).items())
    damaged = replace(second.buckets[-1], checksum=second.buckets[-1].checksum ^ 1)
    with pytest.raises(WeightsRefused, match="version 2 has the checksum"):
        worker.load(replace(second, buckets=(*second.buckets[:-1], damaged)))
    assert worker.version == 1 and equal(worker.held(), named(1.0))
    assert worker.load(second) == 2 and equal(worker.held(), named(2.0))


def test_an_older_version_that_comes_late_is_left_aside_and_a_torn_one_is_mended():
    post, worker = WeightPost(turns=4), TestedWorker()
    first, second = post.post(named(1.0).items()), post.post(named(2.0).items())
    assert worker.load(second) == worker.load(first) == 2 and equal(worker.held(), named(2.0))
    worker.version = TORN
    assert worker.load(first) == 1 and equal(worker.held(), named(1.0))


@pytest.mark.parametrize("near", [True, False])
def test_ranks_of_a_workers_engine_map_the_trainers_memory_where_they_can(near):
    """A copy in the worker would double the host's memory: 64 GB for each worker of 32 billion weights."""
    kept, given = [], []
    post = WeightPost(store=None if near else lambda content: kept.append(content.copy()) or 0, shared=near)
    worker = TestedWorker()
    worker.fetch = kept.__getitem__
    worker.engine = SimpleNamespace(post=object(), update_weights=lambda tensors, **where: given.append(where))
    posted = post.post({"a": torch.ones(3)}.items())
    assert worker.load(posted) == 1 and given == [{"posted": posted} if near else {}]

    handed, engine = [], VLLMEngine.__new__(VLLMEngine)
    engine.post, engine.reset_caches = SimpleNamespace(post=lambda tensors: "a copy"), lambda: None
    told = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen2")))
    rpc = SimpleNamespace(collective_rpc=lambda call, args: handed.append(*args), apply_model=lambda call: None)
    engine.llm = SimpleNamespace(llm_engine=told, **vars(rpc))
    engine.update_weights(iter(()), **given[0])
    assert handed == [posted if near else "a copy"]


def test_workers_of_a_host_share_the_checking_and_each_refuses_what_is_damaged(monkeypatch):
    hashed = []
    digest = weights.xxhash.xxh3_64_intdigest
    monkeypatch.setattr(weights.xxhash, "xxh3_64_intdigest", lambda content: hashed.append(1) or digest(content))
    post, mapped = WeightPost(bucket_bytes=200), [MappedFiles(), MappedFiles()]
    for scale in (1.0, 2.0, 3.0):  # the third is written where the first one was
        posted = post.post(named(scale).items())
        hashed.clear()
        assert all(same(received(posted, files=files), named(scale)) for files in mapped)
        assert len(hashed) == len(posted.buckets) > 1
    other = replace(posted.buckets[0], checksum=posted.buckets[0].checksum ^ 1)  # passed, but not with this one
    with pytest.raises(WeightsRefused, match="bucket 0 of weight version 3"):
        received(replace(posted, buckets=(other, *posted.buckets[1:])), files=mapped[0])
    posted = post.post(named(4.0).items())
    post._files[0, 1].content[3] += 1
    for files in mapped:
        with pytest.raises(WeightsRefused, match="bucket 1 of weight version 4 .* damaged on its way"):
            received(posted, files=files)


def test_tensors_larger_than_a_chunk_arrive_whole_and_are_hashed_as_they_lie():
    chunk = weights.CHUNK_BYTES
    wanted = {
        "long": torch.arange(chunk // 2, dtype=torch.float32),
        "odd": torch.arange(chunk + 7, dtype=torch.int32).to(torch.uint8),
        "turned": torch.arange(chunk, dtype=torch.float32).view(2, -1).t(),
    }
    assert same(received(WeightPost().post(wanted.items())), wanted)


def test_a_parameter_takes_over_the_trainers_memory_and_the_next_version_in_it_is_a_whole_one():
    post, files = WeightPost(bucket_bytes=200), MappedFiles()
    own = {name: torch.nn.Parameter(torch.zeros_like(value), requires_grad=False) for name, value in named().items()}
    own["half"].data = own["half"].float()  # computes in another precision than what is sent
    tied = own["big"]
    for scale in (1.0, 2.0, 3.0):
        for name, value in received(post.post(named(scale).items()), files=files):
            take_over(own[name], value)
        assert equal({name: each.data for name, each in own.items()}, named(scale))  # in the precision of the trainer
        assert own["big"] is tied
    assert own["big"].is_shared()
    kept = own["big"].clone()
    post.post(named(4.0).items())  # written beside the version that is computed with
    assert torch.equal(own["big"], kept)


def test_a_version_that_did_not_come_by_the_host_leaves_the_trainers_memory_alone():
    """Other workers may map what this one computed with until now."""
    post, files = WeightPost(), MappedFiles()
    posted = post.post({"big": named()["big"]}.items())
    parameter = torch.nn.Parameter(torch.zeros(40, 7), requires_grad=False)
    take_over(parameter, received(posted, files=files)[0][1])
    assert parameter.is_shared()
    take_over(parameter, named(2.0)["big"])
    assert torch.equal(parameter, named(2.0)["big"]) and not parameter.is_shared()
    assert same(received(posted), {"big": named()["big"]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_shared_memory_values_are_copied(dtype):
    source, parameter = torch.ones(3, dtype=dtype), torch.nn.Parameter(torch.zeros(3))
    take_over(parameter, source)
    source += 1
    assert torch.equal(parameter, torch.ones(3, dtype=dtype)) and parameter.dtype == dtype
