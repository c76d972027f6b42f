"""Mask secrets in what is written or said: in saved configurations, reports, trackers, and messages that quote values.

A secret shows in a setting's name (`password`, `api_key`, `Authorization`, everything below `env` or `headers`),
or in the text: user and query of a URL, options and assignments of a command, and the forms of well-known keys. Names
that end in `_env` only name a variable. A secret of another form is not noticed: settings such as `api_key_env` and
`pass_env` keep secrets out of configurations altogether.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from megarl.errors import ConfigError

MASK = "***masked***"

_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_SECRET = re.compile(
    r"passw(or)?d|passphrase|passcode|secret|credential|authorization|bearer|cookie|jwt|private_?key"
    r"|(^|_)(auth|creds|dsn|pass|pin|pw|pwd|sas|sig|signature)$"
    r"|(api|access|account|admin|app|auth|client|consumer|encryption|hmac|hub|license|master|refresh|service|session"
    r"|shared|signing|ssh|storage|subscription|webhook)_?(key|token)s?(_|$)"
    # Not those of a tokenizer.
    r"|(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!stop_)(?<!start_)(?<!end_)(?<!begin_)"
    r"(?<!image_)(?<!think_)(?<!special_)token$"
)
# Names of what is not the secret itself: the variable or file that has it, its kind.
_ABOUT = re.compile(r"_(env|file|path|dir|name|type|mode|url)s?$")
# Everything below these is secret.
_WHOLLY = frozenset({"env", "environ", "environment_variables", "headers", "cookies"})
# A value of a name that ends in `key`, which is more often that of a column.
_KEY = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.-]{16,}")

_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s\"'<>]+)")
# The second form is that of a password with characters that a URL may not hold there.
_USER = re.compile(r"(?:[^/?#]*|[^/?#@:]*:(?!\d*[/?#]).*)@")
_QUERY = re.compile(r"([?&;#])([^=&;#]+)=([^&;#]*)")
_IN_QUERY = frozenset({"key", "code", "sid", "session", "access", "hash", "user", "username"})
_FORMS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,500}\.[\w-]+\.[\w-]*)"
    r"|(?<=\bBearer )(?=\S*\d)\S{8,}|(?<=\bBasic )(?=\S*[\d=])[A-Za-z0-9+/=]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
# An option of a command, an assignment, an entry of JSON, and a header.
_NAMED = (
    re.compile(r"(?<!\S)(--?(?P<name>[A-Za-z][\w.-]*)[= ]\s*)(?P<value>\S+)"),
    re.compile(r"(?<![\w.?&#-])((?P<name>\w+)=)(?P<value>[^\s;,&]+)"),
    re.compile(r"([\"'](?P<name>[\w .-]+)[\"']\s*:\s*[\"'])(?P<value>[^\"']+)"),
    re.compile(r"^((?P<name>(?i:authorization|cookie)|\w+-[\w-]+)\s*:\s*)(?P<value>\S.*)$", re.MULTILINE),
)


def is_secret_name(name: str) -> bool:
    """Return whether a setting, variable, header or option of this name has a secret as its value.

    >>> [is_secret_name(name) for name in ("apiKey", "X-Auth-Token", "DB_PASSWORD", "api_key_env", "max_tokens")]
    [True, True, True, False, False]
    """
    plain = "_".join(word.lower() for word in _BORDER.split(name) if word)
    return bool(_SECRET.search(plain)) and not _ABOUT.search(plain)


def masked(value: object, name: str = "") -> Any:
    """Return a JSON value without its secrets; `name` is its dotted key, of which the last part counts."""
    key = name.rpartition(".")[2]
    return _masked(value, key, is_secret=is_secret_name(key))


def masked_text(text: str) -> str:
    """Return a text without the secrets that show in it.

    >>> masked_text("https://me:pw@host:8/a?api_key=1&n=2")
    'https://***masked***@host:8/a?api_key=***masked***&n=2'
    """
    text = _URL.sub(lambda found: found[1] + _masked_address(found[2]), text)
    for pattern in _NAMED:
        text = pattern.sub(lambda m: m[1] + MASK if is_secret_name(m["name"]) else m[0], text)
    return _FORMS.sub(MASK, text)


def require_unmasked(settings: Mapping[str, object]) -> None:
    """Raise ConfigError if a setting has a mask in the place of its secret, because a saved configuration is used."""
    for key, value in _texts(settings, ""):
        if MASK in value:
            raise ConfigError(
                f"{key}: got {value!r}, the mask of a secret, which megarl does not write into files; use the run file "
                "that sets it, or set it again"
            )


def require_no_secrets(words: object, key: str) -> None:
    """Raise ConfigError if a command, or a flag of one, has a secret: every user of a host can read command lines."""
    if masked(words) != words:
        raise ConfigError(
            f"{key}: has a secret, and every user of a host can read the command lines of its processes; put it into "
            "an environment variable, and name that in pass_env"
        )


def _masked(value: object, name: str, *, is_secret: bool) -> Any:
    if isinstance(value, Mapping):
        inner = is_secret or name.lower() in _WHOLLY
        about = name.endswith("_env")
        return {
            key: _masked(item, str(key), is_secret=not about and (inner or is_secret_name(str(key))))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        # The word after an option, as in --token abc.
        options = [False, *(isinstance(word, str) and word.startswith("-") for word in value)]
        return type(value)(
            _masked(
                item,
                name,
                is_secret=is_secret or (options[i] and "=" not in value[i - 1] and is_secret_name(value[i - 1])),
            )
            for i, item in enumerate(value)
        )
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_secret:
        return MASK
    if not isinstance(value, str):
        return value
    if name.lower().endswith("key") and _KEY.fullmatch(value):
        return MASK
    return masked_text(value)


def _masked_address(rest: str) -> str:
    """Mask what follows the scheme of a URL."""
    user = _USER.match(rest)
    rest = f"{MASK}@{rest[user.end() :]}" if user else rest

    def query(found: re.Match[str]) -> str:
        name = unquote(found[2])
        is_secret = is_secret_name(name) or name.lower() in _IN_QUERY or name.lower().endswith("key")
        return f"{found[1]}{found[2]}={MASK}" if is_secret and found[3] else found[0]

    return _QUERY.sub(query, rest)


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Yield every text of a JSON value with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _texts(item, f"{key}[{i}]")
