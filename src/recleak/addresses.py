"""Addresses of services as they may be shown: without the name and the password in front of the host."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/?#\s]*@", re.IGNORECASE)


def without_password(text: str) -> str:
    """Any text in which addresses have lost `user:password@`.

    >>> without_password("recleak audit --mlflow http://alice:s3cret@host:5000/x")
    'recleak audit --mlflow http://host:5000/x'
    """
    return _SECRET.sub(r"\1", text)
