"""Functions that hide the secrets of URLs in texts, and the URLs of SQLite's files."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

HIDDEN = "***"
_ON_DISK = ("sqlite", "journal", "file")  # schemes whose URLs name a path, where an "@" is part of the path
_DATABASE = re.compile(r"(postgres|mysql|mariadb)[\w+]*$")  # schemes whose URLs end in a name, where an "@" is of a password
_PARAMETER = re.compile(r"[?&;#]([^?&;#=]*)=")
_SECRET = re.compile("pass|pwd|secret|token|key|cred|auth|sig", re.IGNORECASE)
_NAME = re.compile(r"[\w.+-]*")
_URL = re.compile(r"[\w+.-]+://[^\s'\"]+")
_SQLITE = re.compile(r"sqlite(?:\+pysqlite)?:///([^?]*)(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")
_BROKEN_SCHEME = re.compile(r"[\w+.-]*(:/|//)")
_BARE_USER = re.compile(r"[^\s:/]*:\S*")
_BARE_HOST = re.compile(r"(?!\d+\b(?!\.))[^\s:/]+[.:/]")  # a name or a number with dots, and no single number as in `stream:4@2`


def without_secrets(url: str) -> str:
    """Return a URL without its password and without the values of secret-looking query parameters.

    The URL may be malformed.
    """
    url, query = _query(url)
    user = _user(url)
    return url[: user.start] + HIDDEN * (user.stop > user.start) + url[user.stop :] + HIDDEN * bool(query)


def holds_secret(url: str) -> bool:
    """Whether `without_secrets` changes a URL."""
    return without_secrets(url) != url


def told_without(text: str, url: str | None = None) -> str:
    """Return a text without the secrets of the URLs in it.

    Args:
        url: the URL that the text is about. The text may quote any part of this URL, so every word of three or more
            characters that occurs in the URL's secret is hidden, too.
    """
    if url is not None:
        plain, query = _query(url)
        user = _user(plain)
        secret = f"{plain[user.start : user.stop]} {query}"
        known = f"{secret} {unquote(secret)}".lower()
        text = text.replace(url, without_secrets(url))
        text = re.sub(r"[\w%+-]{3,}", lambda word: HIDDEN if word.group().lower() in known else word.group(), text)
    return _URL.sub(lambda match: without_secrets(match.group()), text)


def sqlite_url(path: Path) -> str:
    """Return the URL of a database in a file, as SQLAlchemy reads it. The path may hold any character.

    Where a character is escaped, the URL names the driver as well. Otherwise MLflow would make the folder of the escaped path.
    """
    plain = str(path)
    quoted = re.sub(r"[%?{}]", lambda found: f"%{ord(found[0]):02X}", plain)  # Optuna fills in what stands in braces
    return f"sqlite:///{plain}" if quoted == plain else f"sqlite+pysqlite:///{quoted}"


def sqlite_parts(url: str) -> tuple[Path, str] | None:
    """Return the path of SQLite's file in a URL, and its query with the `?`; None for another URL. The path may be empty."""
    found = _SQLITE.fullmatch(url)
    return found and (Path(unquote(found[1])), found[2])


def _query(url: str) -> tuple[str, str]:
    """Split a URL before the value of its first secret parameter.

    The second part runs to the end of the URL, because the value may hold any character, also the separators of parameters.
    """
    secret = next((parameter for parameter in _PARAMETER.finditer(url) if _SECRET.search(parameter.group(1))), None)
    return (url, "") if secret is None else (url[: secret.end()], url[secret.end() :])


def _user(url: str) -> range:
    """Return the positions of user and password in a URL; an empty range if nothing there is secret.

    They are in the authority, which ends at the next "/", "?" or "#". But a password may hold any character, escaped or not. So
    they end at the last "@" of the text, if there is a password. A text without a scheme has one only if it reads
    USER:PASSWORD@HOST, as an address from which the scheme is missing.
    """
    end = url.rfind("@")
    if end < 1:
        return range(0)
    if "://" in url[:end]:
        begins = [match.end() for match in re.finditer("://", url[:end])]
        begin = next((begin for begin in begins if _holds_user(url[max(begin - 40, 0) : begin - 3], url[begin:])), end)
        return range(begin, end)
    broken = _BROKEN_SCHEME.match(url)
    bare = _BARE_USER.fullmatch(url, 0, end) and _BARE_HOST.match(url, end + 1)
    return range(end if (_holds_user("", url[broken.end() :]) if broken else bare) else 0)


def _holds_user(scheme: str, rest: str) -> bool:
    """Whether the text behind the scheme of a URL begins with a secret user. Other text may stand before the scheme.

    A user's name alone is not secret (`postgresql://USER@HOST`, `abfss://CONTAINER@HOST`), except in a web URL, where it may be
    a token.
    """
    if scheme.endswith(_ON_DISK) and rest.startswith("/"):
        return False
    authority = re.split("[/?#]", rest.lstrip("/"), maxsplit=1)[0]
    user, at, _ = authority.rpartition("@")
    if at:
        return not _NAME.fullmatch(user) or scheme.endswith(("http", "https"))
    # What looks like a port is the beginning of a password, if it is no number, or if no path may follow it.
    return "@" in rest and ":" in authority and (not _HOST.fullmatch(authority) or bool(_DATABASE.search(scheme)))
