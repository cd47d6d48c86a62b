"""Conversion of weights to and from Hugging Face's `GPT2LMHeadModel`.

Its linear layers store their weights transposed, and the embedding has no padding rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from podium.errors import UserError
from podium.workloads.gpt2.model import Gpt2

#: for each tensor of a block: our name, theirs, and whether the weight is transposed
_BLOCK = [
    ("attention_norm", "ln_1", False),
    ("attention.qkv", "attn.c_attn", True),
    ("attention.out", "attn.c_proj", True),
    ("feed_forward_norm", "ln_2", False),
    ("feed_forward.wide", "mlp.c_fc", True),
    ("feed_forward.out", "mlp.c_proj", True),
]
_PREFIX = "transformer."


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
        tensors["lm_head.weight"] = own["head.out.weight"].detach()[:vocabulary]
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_positions": section.context,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": section.dropout,
        "attn_pdrop": section.dropout,
        "resid_pdrop": section.dropout,
        "tie_word_embeddings": section.tied,
    }
    return config, tensors


def from_huggingface(model: Gpt2, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights; raise UserError if they belong to another model."""
    section, vocabulary = model.section, model.vocabulary
    layers, hidden, heads = section.shape
    if config.get("model_type") != "gpt2":
        raise UserError(f"these are the weights of a {config.get('model_type')} model, not of gpt2")
    wanted = {
        "n_layer": ("layers", layers),
        "n_embd": ("hidden", hidden),
        "n_head": ("heads", heads),
        "n_positions": ("context", section.context),
        "vocab_size": ("vocabulary", vocabulary),
    }
    for theirs, (ours, value) in wanted.items():
        if config.get(theirs) != value:
            raise UserError(
                f"workload.model has {ours} = {value}, but the weights to start from have {theirs} = "
                f"{config.get(theirs)}: the two must agree"
            )
    tied_there = config.get("tie_word_embeddings", True) is not False
    if section.tied and not tied_there:
        raise UserError("the weights to start from have a head of their own: set workload.model.tied=false")
    for key, known in {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,)}.items():
        if config.get(key, known[0]) not in known:
            raise UserError(f"the weights to start from were trained with {key} = {config[key]}, not {known[0]}")
    if config.get("n_inner") not in (None, 4 * hidden):
        raise UserError(f"the weights to start from have n_inner = {config['n_inner']}, not {4 * hidden}")
    own = model.state_dict()
    found = {name if name.startswith((_PREFIX, "lm_head")) else f"{_PREFIX}{name}": t for name, t in tensors.items()}
    pairs = list(_pairs(layers))
    if not section.tied:
        head = "lm_head.weight" if "lm_head.weight" in found else f"{_PREFIX}wte.weight"
        pairs.append(("head.out.weight", head, False))
    with torch.no_grad():
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
            into.copy_(tensor)


def _sizes(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape))
