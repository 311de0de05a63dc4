"""Whether a download has a chance, found out in seconds."""

import contextlib
import os
import socket
import threading


def reachable(host: str, timeout_seconds: float = 3.0) -> bool:
    """Whether a host answers in time, its name's look-up included. Behind a proxy only a download can tell."""
    if os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY"):
        return True
    answered = threading.Event()

    def probe():
        with contextlib.suppress(OSError), socket.create_connection((host, 443), timeout=timeout_seconds):
            answered.set()

    threading.Thread(target=probe, daemon=True).start()
    return answered.wait(timeout_seconds)
