"""Runs the parts of the GPU check one after the other and writes their results as one markdown table.

    python scripts/gpu/check.py [--out DIR] [--only PART,PART] [--size real|tiny] [--docs docs/benchmarks.md] [--list]
    python scripts/gpu/check.py --ranks N [--hostfile F] ...        the parts of several cards; results in DIR/ranks_N

--docs PAGE: the table also goes into this page, between two marks with the size and the number of ranks.
--hostfile F: DeepSpeed's list of hosts, which see this folder under the same path; N is then their ranks together.
--size tiny runs every part on tiny shapes, also without a GPU, to try the kit itself. Exit code 1 when a part failed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import parts  # noqa: E402

SLOW_HOST = 5  # tiny shapes are for hosts without a card, which may be busy: the limits are those of a card


def run_part(name: str, out: Path, size: str, limit: int) -> dict:
    """One part in a process of its own, ended at its time limit; the result is also written to OUT/NAME.json."""
    started = time.monotonic()
    result: dict = {"part": name, "size": size, "rows": []}
    file = "node.py" if "GPU_CHECK_RANKS" in os.environ else "parts.py"
    command = [sys.executable, str(HERE / file), name, str(out), size]
    limit *= 1 if size == "real" else SLOW_HOST
    log = out / f"{name}.log"
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(limit)
            result["error"] = None if code == 0 else f"exit code {code}; see {log.name}"
        except subprocess.TimeoutExpired:
            result["error"] = f"cut off after {limit} s; see {log.name}"
        finally:
            end_group(process)
    rows = out / f"{name}.rows.json"
    if rows.is_file():  # a part that fails in its middle keeps what it had
        result["rows"] = json.loads(rows.read_text())
    result |= {"seconds": round(time.monotonic() - started), "host": parts.host()}
    parts.write_whole(out / f"{name}.json", json.dumps(result, indent=1))
    return result


def end_group(process: subprocess.Popen) -> None:
    """End a part's process and the runs that it started, which would keep the card's memory."""
    import psutil

    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in below:  # ranks have a session of their own
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def done_before(path: Path, size: str) -> bool:
    """Whether a part has a result of this size, without an error: one of tiny shapes says nothing of a card."""
    if not path.is_file():
        return False
    result = json.loads(path.read_text())
    return result["error"] is None and result["size"] == size and "host" in result  # of older kits it is not known


def table(results: list[dict]) -> str:
    """The results as markdown: the device and the versions that they were made with, then a line for each value."""
    lines, host = [], None
    for result in results:
        if result["host"] != host:
            host = result["host"]
            versions = ", ".join(f"{name} {value}" for name, value in host.items() if name != "device")
            lines += [*[""] * bool(lines), f"Device: {host['device']}. {versions}.", ""]
            lines += ["| part | what | value |", "|---|---|---|"]
        rows = result["rows"] + ([["failed", result["error"]]] if result["error"] else [])
        lines += [f"| {result['part']} | {what} | {value} |" for what, value in rows]
        lines.append(f"| {result['part']} | whole part | {result['seconds']} s |")
    return "\n".join(lines) + "\n"


def told(out: Path, names: Iterable[str], size: str) -> str:
    """The table of the parts that have a result of this size, which also stands in OUT/gpu_check.md."""
    found = [json.loads(path.read_text()) for name in names if (path := out / f"{name}.json").is_file()]
    text = table([result for result in found if result["size"] == size and "host" in result])
    (out / "gpu_check.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_check"), help="with ranks: its folder ranks_N")
    parser.add_argument("--only", help="comma-separated parts; they run even if they are done")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--hostfile", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    parts.end_by_signals()  # and with this process its part ends
    limits, usual = parts.LIMITS, list(parts.PARTS)
    if arguments.ranks > 1:
        os.environ["GPU_CHECK_RANKS"] = str(arguments.ranks)
        if arguments.hostfile is not None:
            os.environ["GPU_CHECK_HOSTFILE"] = str(arguments.hostfile.resolve())
        import node

        limits = {name: limit for name, (_, limit) in node.PARTS.items()}
        usual = list(node.PARTS)
    if arguments.list:
        print("\n".join(f"{name}: at most {limit} s" for name, limit in limits.items()))
        by_name = "".join(f", {name}" for name in limits if name not in usual)
        print(f"all{' but' + by_name[1:] + ', run by name' if by_name else ''}: at most "
              f"{sum(limits[name] for name in usual) / 60:.0f} minutes")  # fmt: skip
        return
    wanted = arguments.only.split(",") if arguments.only else usual
    unknown = sorted(set(wanted) - set(limits))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are: {', '.join(limits)}")
    out = (arguments.out / ("" if arguments.ranks == 1 else f"ranks_{arguments.ranks}")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        if done_before(out / f"{name}.json", arguments.size) and not arguments.only:
            print(f"{name}: done before", flush=True)
            continue
        result = run_part(name, out, arguments.size, limits[name])
        print(f"{name}: {result['error'] or 'ok'} ({result['seconds']} s)", flush=True)
        told(out, limits, arguments.size)
    text = told(out, limits, arguments.size)
    print(text)
    if arguments.docs is not None:
        shape = f"scripts/gpu/check.sh --ranks {arguments.ranks} --size {arguments.size}"
        mark = f"gpu_check of {arguments.ranks}, {arguments.size}"
        parts.into(arguments.docs, mark, f"What `{shape}` gave", f"\n{text}\n")
    results = [json.loads((out / f"{name}.json").read_text()) for name in wanted]
    sys.exit(any(result["error"] for result in results))


if __name__ == "__main__":
    main()
