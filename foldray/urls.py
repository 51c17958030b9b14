"""Secrets in URLs, and how texts are told without them."""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"
_ON_DISK = ("sqlite", "journal", "file")  # schemes whose URLs name a path: an "@" in it ends no user
_PARAMETER = re.compile(r"[?&;#]([^?&;#=]*)=")
_SECRET = re.compile("pass|pwd|secret|token|key|cred|auth|sig", re.IGNORECASE)
_NAME = re.compile(r"[\w.+-]*")
_URL = re.compile(r"[\w+.-]+://[^\s'\"]+")


def without_secrets(url: str) -> str:
    """A URL, however malformed, without its password, and without what secret-looking parameters of its query hold."""
    url, query = _query(url)
    user = _user(url)
    return url[: user.start] + HIDDEN * (user.stop > user.start) + url[user.stop :] + HIDDEN * bool(query)


def holds_secret(url: str) -> bool:
    return without_secrets(url) != url


def told_without(text: str, url: str | None = None) -> str:
    """A text without the secrets of all URLs in it.

    Args:
        url: what the text is about. It may quote any part of it: whatever words it shares with the secret are hidden, too.
    """
    if url is not None:
        plain, query = _query(url)
        user = _user(plain)
        secret = f"{plain[user.start : user.stop]} {query}"
        known = f"{secret} {unquote(secret)}".lower()
        text = text.replace(url, without_secrets(url))
        text = re.sub(r"[\w%+-]{3,}", lambda word: HIDDEN if word.group().lower() in known else word.group(), text)
    return _URL.sub(lambda found: without_secrets(found.group()), text)


def _query(url: str) -> tuple[str, str]:
    """What comes before the first secret parameter's value, and all from there on: nobody can tell where such a value ends."""
    found = next((each for each in _PARAMETER.finditer(url) if _SECRET.search(each.group(1))), None)
    return (url, "") if found is None else (url[: found.end()], url[found.end() :])


def _user(url: str) -> range:
    """Where user and password are: a password may hold any character, escaped or not, so it ends at the last "@".

    A name alone is no secret (`postgresql://USER@HOST`, `abfss://CONTAINER@HOST`), but to a web server it may be a token.
    """
    end = max(url.rfind("@"), 0)
    begin = url.find("://", 0, end) + 3
    if begin < 3:  # no URL, or half of one: `USER:PASSWORD@HOST`
        is_path = url.startswith("/") and not url.startswith("//")
        return range(end if ":" in url[:end] and not is_path else 0)
    scheme, user = url[: begin - 3], url[begin:end]
    is_path = scheme.endswith(_ON_DISK) and user.startswith("/")
    is_name = _NAME.fullmatch(user) and not scheme.endswith(("http", "https"))
    return range(begin, begin if is_path or is_name else end)
