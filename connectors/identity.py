"""Namespaces: whatever makes an engine's bytes mean the same is part of the name."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

FORMAT_VERSION = 1
"""Changes with the way a block's bytes follow from an engine's memory."""

MODEL_CHARS = 80
SAMPLES = 16
SAMPLE_BYTES = 4096
SMALL_FILES = ("config.json", "generation_config.json", "quantize_config.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def namespace_of(engine: str, model: str, facts: Mapping[str, Any]) -> str:
    """Return the namespace of blocks that all these facts hold for.

    Parameters
    ----------
    engine : str
        Its kind, such as "vllm".
    model : str
        Shown in the name; what tells models apart belongs into `facts` too.
    facts : mapping
        JSON values. Two engines share blocks only where every one is equal.
    """
    text = msgspec.json.encode({"format": FORMAT_VERSION, **facts}, order="sorted")
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    shown = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])
    return f"{engine}/{shown[:MODEL_CHARS] or 'model'}/{digest}"


def fingerprint(model: str, revision: str | None = None, commit: str | None = None) -> str:
    """Return what tells a model's weights from all others.

    Parameters
    ----------
    model : str
        A directory, or a name of a hub.
    revision : str, optional
        As asked for.
    commit : str, optional
        As resolved, for a model of a hub.

    Notes
    -----
    Of a directory: its configuration, the weights' index, and of each file of weights its size
    and some pages all over it, so that fine-tuned copies of one shape differ.
    """
    directory = Path(model)
    if not directory.is_dir():
        return f"{model}@{commit or revision or 'main'}"
    found = hashlib.blake2b(digest_size=16)
    small = [directory / name for name in SMALL_FILES]
    small += sorted(directory.glob("*.index.json"))
    for path in small:
        if path.is_file():
            found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for pattern in WEIGHTS:
        for path in sorted(directory.glob(pattern)):
            found.update(path.name.encode() + b"\0")
            _add_samples(found, path)
    return found.hexdigest()


def _add_samples(found: Any, path: Path) -> None:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        found.update(size.to_bytes(8, "big"))
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            found.update(file.read(SAMPLE_BYTES))
