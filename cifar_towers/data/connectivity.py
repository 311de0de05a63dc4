"""Quick check whether a download can succeed."""

import contextlib
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

PORTS = {"http": 80, "https": 443, "ftp": 21}


def reachable(url: str, timeout_seconds: float = 3.0) -> bool:
    """Whether a URL's host, or the proxy for it, accepts a connection in time, name resolution included. True for
    addresses with an unknown port, as only a download can show it."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.netloc):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or PORTS.get(parts.scheme)
    if not port:
        return True
    connected = threading.Event()

    def connect():
        with contextlib.suppress(OSError), socket.create_connection((parts.hostname, port), timeout=timeout_seconds):
            connected.set()

    thread = threading.Thread(target=connect, daemon=True)  # name resolution has no timeout of its own
    thread.start()
    thread.join(timeout_seconds)
    return connected.is_set()
