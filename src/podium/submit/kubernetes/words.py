"""Kinds of text in a site's `kubernetes` section that the API server takes: checked before anything is sent there."""

import hashlib
import re
from typing import Annotated

from pydantic import AfterValidator

from podium.submit.words import matching

#: the name of an object: a claim, a secret, a service account
ObjectName = Annotated[
    str, matching(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "a name of Kubernetes: small letters, digits, dashes")
]
#: an amount of memory: 16Gi, 500M
Memory = Annotated[str, matching(r"[1-9][0-9]{0,11}(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?", "an amount of memory such as 16Gi")]
#: a label's or taint's key: example.com/gpu
LabelKey = Annotated[
    str,
    matching(
        r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
        "a key of Kubernetes such as example.com/gpu",
    ),
]
LabelValue = Annotated[
    str, matching(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", "a value of a label: letters, digits, -_.")
]


def _folder(text: str) -> str:
    if not text.startswith("/") or ":" in text or ".." in text.split("/") or not text.isprintable():
        raise ValueError("expected the path of a folder, from / on and without a colon")
    return text


#: where a pod or a node has a folder
Folder = Annotated[str, AfterValidator(_folder)]


def pod_name(name: str, longest: int = 40) -> str:
    """Return the name that Kubernetes can give to a job: of its objects, and of hosts in the name service."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".strip("-")
    return (
        plain
        if len(plain) <= longest
        else f"{plain[: longest - 7].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    )
