"""The main job, shown on the real service and a real model; every step is checked.

    python -m torpor.service.walkthrough [--model PATH] [--tensor-parallel N] [--device auto|host|cuda] [--keep]

Asks a question, sleeps, shows what the device and the kernel say is free, is refused, wakes, and gets the same
answer: once with the KV cache kept, once with it discarded. Exits with 0 only if every step held.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from torpor.service.client.blocking import Client
from torpor.service.client.errors import ClientError
from torpor.service.default_model import DefaultModelError, ensure_default_model
from torpor.service.walkthrough.child import ChildService, StepFailed
from torpor.service.walkthrough.steps import MODEL, walk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torpor.service.walkthrough", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or folder; default: the small default model")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--device", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument("--keep", action="store_true", help="leave the service running at the end")
    arguments = parser.parse_args()
    console = Console()
    started = time.monotonic()
    try:
        with ExitStack() as stack:
            path = arguments.model or ensure_default_model(dict(os.environ), say=console.print)
            folder = Path(tempfile.mkdtemp(prefix="torpor-walkthrough-"))
            service = ChildService(
                folder, MODEL, path.resolve(), arguments.tensor_parallel, arguments.device, console
            )
            stack.callback(service.kill)
            service.start()
            with Client(service.url, timeout_s=300) as client:
                walk(client, console)
            # What a failure leaves for looking into, a success does not need.
            if arguments.keep:
                stack.pop_all()
                console.print(f"\nThe service goes on at {service.url}; end it with: kill {service.pid}")
            else:
                service.stop()
                shutil.rmtree(folder)
    except (StepFailed, ClientError, DefaultModelError) as error:
        print(f"\nwalk-through failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nwalk-through interrupted", file=sys.stderr)
        return 1
    console.print(f"\n[bold green]Every step held[/bold green] ({time.monotonic() - started:.1f} s).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
