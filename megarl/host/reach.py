"""Find out whether anybody accepts connections at the addresses that settings name, without saying a word there."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from megarl.host.masking import masked_text

# A host that is there answers within milliseconds; one that is not may never do so.
CONNECT_S = 5.0
# SOCKS proxies have the port 1080.
_PORTS = {"http": 80, "https": 443}


def unreached(addresses: Sequence[str]) -> dict[str, str]:
    """Return of these URLs and HOST:PORTs those at which nobody accepts a connection, each with the reason."""
    with ThreadPoolExecutor(max_workers=min(len(addresses), 16) or 1) as threads:
        reasons = threads.map(why_not, addresses)
        return {masked_text(address): why for address, why in zip(addresses, reasons, strict=True) if why}


def why_not(address: str, within_s: float = CONNECT_S) -> str:
    """Say why a connection to a URL, HOST:PORT or path of a Unix socket does not come about; "" if it does."""
    place = urlsplit(address if "://" in address else f"//{address}")
    port = place.port or _PORTS.get(place.scheme, 1080)
    try:
        if address.startswith("/"):
            with socket.socket(socket.AF_UNIX) as door:
                door.settimeout(within_s)
                door.connect(address)
        else:
            socket.create_connection((place.hostname or "", port), within_s).close()
    except OSError as error:
        return error.strerror or f"no answer within {within_s:g} s"
    return ""
