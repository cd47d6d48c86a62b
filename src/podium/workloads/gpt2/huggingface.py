"""Conversion of weights to and from Hugging Face's `GPT2LMHeadModel`.

Its linear layers store their weights transposed, and the embedding has no padding rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from podium.errors import UserError
from podium.workloads.gpt2.huggingface_config import model_of
from podium.workloads.gpt2.model import Gpt2
from podium.workloads.huggingface_config import exported_activation, tell_what_differs

#: for each tensor of a block: our name, theirs, and whether the weight is transposed
_BLOCK = [
    ("attention_norm", "ln_1", False),
    ("attention.qkv", "attn.c_attn", True),
    ("attention.out", "attn.c_proj", True),
    ("feed_forward_norm", "ln_2", False),
    ("feed_forward.wide", "mlp.c_fc", True),
    ("feed_forward.out", "mlp.c_proj", True),
]
_PREFIX, _HEAD = "transformer.", "lm_head.weight"
#: not weights: which positions may be attended to
_MASKS = (".attn.bias", ".attn.masked_bias")


def _pairs(num_layers: int) -> Iterator[tuple[str, str, bool]]:
    """Yield (our name, theirs, transposed) of every tensor except the head's."""
    yield "embedding.tokens.weight", f"{_PREFIX}wte.weight", False
    yield "embedding.positions.weight", f"{_PREFIX}wpe.weight", False
    for layer in range(num_layers):
        for ours, theirs, transposed in _BLOCK:
            for part in ("weight", "bias"):
                name = f"{_PREFIX}h.{layer}.{theirs}.{part}"
                yield f"blocks.{layer}.{ours}.{part}", name, transposed and part == "weight"
    yield "head.norm.weight", f"{_PREFIX}ln_f.weight", False
    yield "head.norm.bias", f"{_PREFIX}ln_f.bias", False


def to_huggingface(model: Gpt2) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the content of config.json, the tensors by their names there)."""
    section, vocabulary = model.section, model.vocabulary
    layers, hidden, heads = section.shape
    own = model.state_dict()
    tensors = {}
    for ours, theirs, transposed in _pairs(layers):
        tensor = own[ours].detach()
        tensors[theirs] = tensor.T if transposed else tensor
    tensors[f"{_PREFIX}wte.weight"] = tensors[f"{_PREFIX}wte.weight"][:vocabulary]
    if not section.tied:
        tensors[_HEAD] = own["head.out.weight"].detach()[:vocabulary]
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_positions": section.context,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": section.inner,
        "activation_function": exported_activation(section.activation),
        "layer_norm_epsilon": section.norm_eps,
        "scale_attn_weights": section.scale_attention,
        "scale_attn_by_inverse_layer_idx": section.scale_by_layer,
        "initializer_range": 0.02,
        "embd_pdrop": section.dropout,
        "attn_pdrop": section.dropout,
        "resid_pdrop": section.dropout,
        "tie_word_embeddings": section.tied,
    }
    return config, tensors


def from_huggingface(model: Gpt2, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights; if they belong to another model, raise UserError and change nothing."""
    section, vocabulary = model.section, model.vocabulary
    there = model_of(config)
    here = _keys(model)
    for key, value in there.keys.items():
        if key != "tied" and here[key] != value:
            raise UserError(
                f"workload.model has {key} = {here[key]}, but the weights to start from have {there.names[key]} = "
                f"{config.get(there.names[key], value)}: the two must agree"
            )
    own = model.state_dict()
    found = {name if name.startswith((_PREFIX, _HEAD)) else f"{_PREFIX}{name}": t for name, t in tensors.items()}
    embedding = f"{_PREFIX}wte.weight"
    if section.tied and (not there.keys["tied"] or not _same(found.get(_HEAD), found.get(embedding))):
        raise UserError("the weights to start from have a head of their own: set workload.model.tied=false")
    pairs = list(_pairs(section.shape[0]))
    if not section.tied:
        pairs.append(("head.out.weight", _HEAD if _HEAD in found else embedding, False))
    copies = []
    for ours, theirs, transposed in pairs:
        if theirs not in found:
            raise UserError(f"the weights to start from have no tensor {theirs}")
        tensor = found[theirs].T if transposed else found[theirs]
        into = own[ours]
        if ours in ("embedding.tokens.weight", "head.out.weight"):
            into = into[:vocabulary]
        if tensor.shape != into.shape:
            raise UserError(
                f"{theirs} of the weights to start from is {_sizes(tensor)}, but the model needs {_sizes(into)}"
            )
        copies.append((into, tensor))
    with torch.no_grad():
        for into, tensor in copies:
            into.copy_(tensor)
    unused = found.keys() - {theirs for _, theirs, _ in pairs} - {_HEAD}
    unused = {name for name in unused if not name.endswith(_MASKS)}
    tell_what_differs(there, here, unused)


def _keys(model: Gpt2) -> dict[str, Any]:
    """Return the keys of `workload.model` with the values that count."""
    section = model.section
    layers, hidden, heads = section.shape
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "inner": section.num_inner}
    return {**section.model_dump(), **sizes, "vocabulary": model.vocabulary}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is None or (other is not None and torch.equal(one, other))


def _sizes(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape))
