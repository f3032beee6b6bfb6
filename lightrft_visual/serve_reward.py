"""Serve a scorer or a callable over HTTP.

    lightrft-visual serve-reward --scorer exact --port 0
    lightrft-visual serve-reward --reward_fn examples/rewards/rule.py:score --port 8000
    lightrft-visual serve-reward --components ocr=1.0 --components jpeg_compressibility=0.2 --kwargs ocr.language=eng

It prints `serving on http://HOST:PORT/reward`; give that address to a run as --remote_rm_url. Bound to loopback unless
--host says otherwise, which then needs a token: --token_env names the environment variable that holds it.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from .config import registry
from .config.recipes import load_plugins, yaml_value
from .errors import ConfigError


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("lightrft-visual serve-reward", description=__doc__, formatter_class=form)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--scorer", default="exact", help="a registered scorer (default: exact)")
    what.add_argument("--reward_fn", help="a function, as path.py:name")
    parser.add_argument("--reward_form", default="auto", help="how the function is called; see docs/coming_from.md")
    what.add_argument("--components", action="append", metavar="NAME=WEIGHT", help="weighted scorers; repeat")
    parser.add_argument(
        "--kwargs", action="append", default=[], metavar="[NAME.]KEY=VALUE", help="scorer settings; repeat"
    )
    parser.add_argument("--plugins", help="files or modules that register scorers of your own; comma-separated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port")
    parser.add_argument("--token_env", help="environment variable with the bearer token that clients must send")
    parser.add_argument("--device", default="cpu", help="where model-based scorers run")
    parser.add_argument("--max_batch", type=int, default=64, help="samples that requests are merged into")
    parser.add_argument("--max_wait", type=float, default=0.005, help="seconds a request waits for others to join")
    parser.add_argument("--max_body_mb", type=int, default=256)
    return parser


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """{"a": {"b": 1}} of ["a.b=1"]; values are YAML."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        path, mark, value = pair.partition("=")
        if not mark or not path:
            raise ConfigError(f"{pair!r}: write it as NAME=VALUE")
        *parents, key = path.split(".")
        inner = settings
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{pair!r}: {parent} has a value already")
        try:
            inner[key] = yaml_value(value)
        except yaml.YAMLError:
            raise ConfigError(f"{pair!r} is not YAML") from None
    return settings


def build(arguments: argparse.Namespace) -> Any:
    """What is served. Raises ConfigError."""
    from .config.shared import RewardConfig
    from .rewards.local.callables import CallableSource
    from .rewards.registry import build_scorer
    from .runtime.usercode.loading import load_reward_fn

    settings = parse_settings(arguments.kwargs)
    if arguments.reward_fn:
        if settings:
            raise ConfigError("--kwargs belongs to --scorer and --components; --plugins has scorers of your own")
        function = load_reward_fn(arguments.reward_fn)
        return CallableSource(function, form=arguments.reward_form, device=arguments.device)
    scorer = arguments.scorer
    if arguments.components:
        scorer, settings = "multi", {"components": parse_settings(arguments.components), "kwargs": settings}
    alone = len(arguments.components or ()) < 2  # nobody else uses the device
    return build_scorer(scorer, settings, RewardConfig(reward_cpu_offload=not alone))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is ended; the exit code is 2 where the settings are wrong."""
    arguments = build_parser().parse_args(argv)
    try:
        for name, least in (("max_batch", 1), ("max_wait", 0), ("max_body_mb", 1)):
            if not least <= (given := getattr(arguments, name)) < math.inf:
                raise ConfigError(f"--{name} is {given}; give a number of at least {least}")
        load_plugins(arguments.plugins)
        _ = registry.scorers[arguments.scorer]  # names are checked before torch is loaded
        from .rewards.remote.client import token_from_env
        from .rewards.remote.server import ServerSettings, serve

        settings = ServerSettings(
            max_batch=arguments.max_batch,
            max_wait=arguments.max_wait,
            max_body_bytes=arguments.max_body_mb * 1024 * 1024,
            token=token_from_env(arguments.token_env),
            device=arguments.device,
        )
        serve(build(arguments), arguments.host, arguments.port, settings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
