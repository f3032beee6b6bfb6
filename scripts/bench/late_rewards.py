"""What remote rewards add to a step whose last samples are scored last.

    OMP_NUM_THREADS=2 python scripts/bench/late_rewards.py FOLDER [--delay 0.2] [--steps 12] [--rounds 3] [flag ...]

Whole runs on the embedded model, 8 prompts x 8 samples of 32 tokens, 3 URLs, requests and micro-batches of 8 samples.
The engine finishes one prompt after another over --generation seconds, the longest last. What is added is the median
step with replies after --delay seconds, less the median step with replies at once; runs alternate. Prints JSON, with
whether the trained weights are the same in all runs of a round. Unknown arguments go to the runs: --init_kl_coef 0.01
brings forward passes, which replies hide behind.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3
FLAGS = (
    "--rollout_batch_size 8 --n_samples_per_prompt 8 --micro_rollout_batch_size 8 --generate_max_len 32 "
    "--min_new_tokens 32 --train_batch_size 64 --micro_train_batch_size 8 --max_eval_samples 0 --eval_steps 0 "
    "--report false --save_trajectories false --logging_steps 1000000 --image_dependence_every 0 --engine_type paced"
)
CASES = ("at once", "late")


def serve(pipe: Connection) -> None:
    """A server that scores by a number made of the text, after the seconds that the path names."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                queries = json.loads(await reader.readexactly(length))["queries"]
                await asyncio.sleep(float(head.split()[1].split("/")[-1]))
                reply = json.dumps({"rewards": [zlib.crc32(each.encode()) % 7 / 7 for each in queries]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: ")
                writer.write(b"%d\r\n\r\n" % len(reply) + reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            writer.close()

    async def run() -> None:
        servers = [await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256) for _ in range(3)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(run())


def run(name: str, folder: Path, ports: list[int], arguments: argparse.Namespace, further: list[str]) -> float:
    """Median seconds of a step."""
    delay = arguments.delay if name == "late" else 0.0
    urls = ",".join(f"http://127.0.0.1:{port}/{delay:g}" for port in ports)
    command = [
        sys.executable, str(ROOT / "examples" / "train_grpo_vl.py"), *FLAGS.split(), "--plugins", __file__,
        "--remote_rm_url", urls, "--max_steps", str(arguments.steps + WARM_UP), "--output_dir", str(folder),
        *further,
    ]  # fmt: skip
    folder.mkdir(parents=True)
    with open(folder / "log.txt", "w") as log:
        pace = {"LIGHTRFT_PACE": str(arguments.generation)}
        subprocess.run(command, env=os.environ | pace, stdout=log, stderr=log, check=True)
    with open(folder / "metrics.csv", newline="") as file:
        return statistics.median(float(row["time_step"]) for row in list(csv.DictReader(file))[WARM_UP:])


def weights_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "checkpoint-final").glob("*.safetensors")))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--generation", type=float, default=1.0)
    parser.add_argument("--delay", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    arguments, further = parser.parse_known_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    ports = ours.recv()
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    same = True
    for number in range(arguments.rounds):
        folders = {name: arguments.folder / str(number) / name.replace(" ", "_") for name in CASES}
        for name, folder in folders.items():
            seconds[name].append(run(name, folder, ports, arguments, further))
        same &= len({weights_of(folder) for folder in folders.values()}) == 1
    server.terminate()
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    added = round(medians["late"] - medians["at once"], 3)
    print(json.dumps({"step_s": medians, "added_s": added, "same_weights": same, "rounds": seconds}))


def paced_engine(config, checkpoint, actor):
    """vLLM, or what the machine has, that finishes one prompt after another over LIGHTRFT_PACE seconds."""
    engine = registry.engines["vllm"].load()(config, checkpoint, actor)
    generate = engine.generate

    def paced(prompts, settings, finished=None):
        began = time.perf_counter()
        made = generate(prompts, settings)
        longest = [max(len(each.token_ids) for each in part) for part in made]
        for place, number in enumerate(sorted(range(len(made)), key=lambda number: (longest[number], number))):
            due = began + float(os.environ["LIGHTRFT_PACE"]) * (place + 1) / len(made)
            time.sleep(max(0.0, due - time.perf_counter()))
            if finished is not None:
                finished(number, made[number])
        return made

    engine.generate = paced
    return engine


if __name__ == "__main__":
    main()
else:
    from lightrft_visual.config import registry

    registry.engines.register("paced", about="finishes prompts one after another, over a stated time")(paced_engine)
