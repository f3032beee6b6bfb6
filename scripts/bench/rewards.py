"""Time of the remote reward phase: several servers, several micro-batches, each reply after a fixed wait.

    python scripts/bench/rewards.py [--urls 3] [--micro_batches 8] [--delay 0.2] [--repeats 5]

The servers run in a process of their own. A serial client takes urls * micro_batches * delay seconds. Prints one JSON
line with the median and the worst time of a phase, and exits with status 1 when the median is above --limit.

With --generation S the micro-batches are finished one after the other over S seconds, and --forward S seconds of other
work (log-probs, reference, critic) follow before the rewards are read. The times are then what the rewards add to both.
late_rewards.py measures whole steps of a trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection

import torch

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout
from lightrft_visual.experience.samples import Samples
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.rewards.batch import RewardOutput


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Every POST gets a score of 1 per query, `delay` seconds after it arrived, on a kept connection."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            await asyncio.sleep(delay)
            reply = json.dumps({"rewards": [1.0] * len(body["queries"])}).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(reply)
            )
            writer.write(reply)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionResetError):
        writer.close()


def serve(count: int, delay: float, pipe: Connection) -> None:
    """`count` servers on free ports, whose numbers go through the pipe; until the process is ended."""

    async def run() -> None:
        def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> asyncio.Future[None]:
            return asyncio.ensure_future(answer(reader, writer, delay))

        servers = [await asyncio.start_server(handler, "127.0.0.1", 0, backlog=256) for _ in range(count)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(run())


def micro_batch(size: int, first: int) -> Samples:
    ids = torch.arange(first, first + size)
    return Samples(
        sequences=torch.ones(size, 64, dtype=torch.long),
        attention_mask=torch.ones(size, 64, dtype=torch.long),
        action_mask=torch.ones(size, 32, dtype=torch.bool),
        group_ids=ids // 8,
        sample_ids=ids,
        truncated=torch.zeros(size, dtype=torch.bool),
        prompts=["What is in the picture? " * 8] * size,
        responses=["Two red circles and a square. " * 4] * size,
        labels=[None] * size,
        references=["2"] * size,
        metadata=[{} for _ in range(size)],
    )


def beside_generation(engine: RewardComputationEngine, arguments: argparse.Namespace) -> RewardOutput:
    size = arguments.batch_size
    prompts = [
        PromptFeatures("What is in the picture? " * 8, [1] * 32, group_id=i) for i in range(arguments.micro_batches)
    ]
    rollouts = [
        Rollout(prompt, [2] * 32, None, "Two red circles and a square. " * 4, False, sample_id=size * number + place)
        for number, prompt in enumerate(prompts)
        for place in range(size)
    ]
    early = engine.begin([None] * len(rollouts), size)
    for start in range(0, len(rollouts), size):
        time.sleep(arguments.generation / arguments.micro_batches)
        early.add(start, rollouts[start : start + size])
    time.sleep(arguments.forward)
    return engine.score_rollouts(rollouts, size, early=early)


def measure(arguments: argparse.Namespace) -> list[float]:
    """Seconds of each phase, the first of which also opens the connections."""
    ours, theirs = multiprocessing.Pipe()
    servers = multiprocessing.Process(target=serve, args=(arguments.urls, arguments.delay, theirs), daemon=True)
    servers.start()
    urls = [f"http://127.0.0.1:{port}/reward" for port in ours.recv()]
    engine = RewardComputationEngine(None, urls, config=RewardConfig(reward_concurrency=arguments.concurrency))
    outputs = [micro_batch(arguments.batch_size, i * arguments.batch_size) for i in range(arguments.micro_batches)]
    seconds = []
    try:
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            if arguments.generation:
                result = beside_generation(engine, arguments)
            else:
                result = engine.compute_rewards(outputs, vlm_mode=False)
            seconds.append(time.perf_counter() - started - arguments.generation - arguments.forward)
            if not bool(result.valid.all()) or set(result.score.tolist()) != {float(arguments.urls)}:
                raise SystemExit("the rewards are not what the servers sent")
    finally:
        engine.close()
        servers.terminate()
        servers.join()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--urls", type=int, default=3)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--delay", type=float, default=0.2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--generation", type=float, default=0.0)
    parser.add_argument("--forward", type=float, default=0.0)
    parser.add_argument("--limit", type=float, default=0.4, help="seconds that the median phase may take")
    arguments = parser.parse_args()
    seconds = measure(arguments)
    figures = {
        "urls": arguments.urls,
        "micro_batches": arguments.micro_batches,
        "reply_after_s": arguments.delay,
        "serial_s": round(arguments.urls * arguments.micro_batches * arguments.delay, 3),
        "first_s": round(seconds[0], 3),
        "median_s": round(statistics.median(seconds), 3),
        "worst_s": round(max(seconds), 3),
    }
    print(json.dumps(figures))
    return int(figures["median_s"] > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
