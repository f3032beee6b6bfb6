"""Secrets in texts, command lines and configurations, replaced by ***."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

MASK = "***"
SHOWN_URL = 200  # characters
# Whole words at the end of a name: `hf_token`, `api_key` are secrets, `max_tokens_per_batch`, `input_key` are not.
SECRET_NAME = re.compile(
    r"(^|[_\-.])(api_?key|access_?key|private_?key|token|secret|password|passwd|credentials?|bearer|authorization)$",
    re.IGNORECASE,
)
USERINFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # user:password in a URL
SECRET_VALUES = (
    re.compile(r"\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[bp]-)[A-Za-z0-9_\-]{12,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    USERINFO,
    re.compile(r"(?i)(?<=bearer )\S+"),
)
# `hf_token: value` and `"api_key": "value"` in YAML or JSON text; an empty or null value is no secret.
NAMED_SECRET = re.compile(
    r"(?im)^(\s*[\"']?(?:[\w.\-]*[_\-.])?(?:api_?key|access_?key|private_?key|token|secret|password|passwd|credentials?)"
    r"[\"']?\s*[:=]\s*)(?!(?:null|none|~|''|\"\")?\s*,?\s*$)\S.*$"
)
# Parameters of a URL: `?sig=`, `&X-Amz-Signature=`, `?hf_token=`.
QUERY_SECRET = re.compile(
    r"(?i)([?&;#](?:\w*token|(?:[\w.\-]*[_\-.])?(?:api_?key|access_?key|key|auth|authorization|secret|password|passwd|pwd|"
    r"signature|sig|credentials?))=)[^&;,\s#]+"
)
URL = re.compile(r"\b[a-z][a-z0-9+.\-]*://[^\s,\"']+", re.IGNORECASE)
KEY_IN_URL = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[bp]-)[A-Za-z0-9]{16,}")


def web_address(url: str) -> SplitResult | None:
    """The parts of an http or https URL with a host; None for anything else, which nobody may connect to."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if usable else None


def shown_url(url: str) -> str:
    """The URL without user, password, query and well-known keys, cut to a length fit for a message."""
    plain = re.split(r"[?#;]", url)[0]
    scheme, mark, rest = plain.partition("://") if "://" in plain else ("", "", plain)
    host, slash, path = rest.partition("/")
    return KEY_IN_URL.sub(MASK, f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}")[:SHOWN_URL]


def mask_urls(text: str) -> str:
    """The text with passwords, tokens, signatures and well-known keys inside its URLs replaced by ***."""

    def masked(found: re.Match[str]) -> str:
        without_user = USERINFO.sub(MASK, found[0])
        return KEY_IN_URL.sub(MASK, QUERY_SECRET.sub(rf"\g<1>{MASK}", without_user))

    return URL.sub(masked, text)


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of environment variables whose names say that they are secret, longest first."""
    environment = os.environ if environment is None else environment
    found = {value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= 8}
    return sorted(found, key=len, reverse=True)


def mask_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with everything that looks like a secret, or is the value of a secret variable, replaced by ***."""
    for value in secret_values(environment):
        text = text.replace(value, MASK)
    for pattern in SECRET_VALUES:
        text = pattern.sub(MASK, text)
    text = QUERY_SECRET.sub(rf"\g<1>{MASK}", text)
    return NAMED_SECRET.sub(rf"\g<1>{MASK}", text)


def mask_command(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """A command line with the values of secret flags masked: `--name value`, `--name=value`, `a.name=value`."""
    masked: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(SECRET_NAME.search(name.lstrip("-")))
        if hide_next and not argument.startswith("--"):
            masked.append(MASK)
        elif is_secret and equals:
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask_text(argument, environment))
        hide_next = is_secret and not equals and argument.startswith("-")
    return masked


def mask_config(value: Any, name: str = "", environment: Mapping[str, str] | None = None) -> Any:
    """A nested config with secret leaves masked, for files and for W&B."""
    if isinstance(value, Mapping):
        return {key: mask_config(item, str(key), environment) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_config(item, name, environment) for item in value]
    if isinstance(value, str):
        return MASK if value and SECRET_NAME.search(name) else mask_text(value, environment)
    return value
