"""Whether a download has a chance, found out in seconds."""

import contextlib
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

PORTS = {"http": 80, "https": 443, "ftp": 21}


def reachable(url: str, timeout_seconds: float = 3.0) -> bool:
    """Whether a URL's host, or the proxy on the way to it, answers in time, its name's look-up included. Where that is
    of no kind that is known here, only a download can tell."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.netloc):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or PORTS.get(parts.scheme)
    if not port:
        return True
    answered = threading.Event()

    def probe():
        with contextlib.suppress(OSError), socket.create_connection((parts.hostname, port), timeout=timeout_seconds):
            answered.set()

    asking = threading.Thread(target=probe, daemon=True)
    asking.start()
    asking.join(timeout_seconds)
    return answered.is_set()
