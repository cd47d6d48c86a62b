"""Kinds of text in site files that reach a shell, a scheduler or a command line: what they may look like.

Everything is quoted where it is used, too. These rules refuse what quoting cannot make harmless, such as a host name
that ssh would read as an option, and what could not have been meant.
"""

import re
from typing import Annotated

from pydantic import AfterValidator

#: names of variables whose values nobody should see
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?$", re.IGNORECASE)


def matching(pattern: str, expected: str) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("expected one line of text without control characters")
    return text


#: one line that people can read, and no control character
Line = Annotated[str, AfterValidator(_one_line)]
#: a host, with a user's name before it if need be; never an option
HostName = Annotated[
    str,
    matching(
        r"([A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_]([A-Za-z0-9._:%-]*[A-Za-z0-9_])?",
        "a host name or address, such as login.example.org or me@10.0.0.1",
    ),
]
VariableName = Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable, such as WANDB_API_KEY")]
#: a partition, an account, a queue, a module: one word
Word = Annotated[str, matching(r"[A-Za-z0-9_][A-Za-z0-9_.,:@%+/=-]*", "one word of letters, digits and .,:@%+/=-")]
#: features of nodes that Slurm combines: a100|v100, [rack1*2&rack2*2]
Features = Annotated[str, matching(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:+/=&|()*\[\]-]*", "features such as a100|v100")]


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a key or a password, as far as its name tells."""
    return _SECRET_NAME.search(name) is not None
