"""Conversion of weights to and from Hugging Face's `BertForPreTraining`.

The fused layer of queries, keys and values here is three layers there; every other tensor has its counterpart.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from podium.errors import UserError
from podium.workloads.bert.huggingface_config import model_of
from podium.workloads.bert.model import Bert
from podium.workloads.huggingface_config import exported_activation, tell_what_differs

_EMBEDDINGS, _HEAD = "bert.embeddings", "cls.predictions"
#: not a weight: the numbers of the positions
_PLACES = f"{_EMBEDDINGS}.position_ids"
_QKV = ("query", "key", "value")
#: tensors that a file may omit because they equal another
_TIED_TO = {
    f"{_HEAD}.decoder.weight": f"{_EMBEDDINGS}.word_embeddings.weight",
    f"{_HEAD}.decoder.bias": f"{_HEAD}.bias",
}
#: names of layer norm parameters in the oldest files
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def names(model: Bert) -> dict[str, tuple[str, ...]]:
    """Map each parameter's name here to its names there; more than one if it is made of several."""
    pairs = {
        "embedding.word.weight": f"{_EMBEDDINGS}.word_embeddings.weight",
        "embedding.position.weight": f"{_EMBEDDINGS}.position_embeddings.weight",
        "embedding.segment.weight": f"{_EMBEDDINGS}.token_type_embeddings.weight",
        "classifier.bias": f"{_HEAD}.bias",
    }
    if not model.section.tied:
        pairs |= {f"classifier.{kind}": f"{_HEAD}.decoder.{kind}" for kind in ("weight", "bias")}
    layers = {
        "embedding.norm": f"{_EMBEDDINGS}.LayerNorm",
        "pooler.dense": "bert.pooler.dense",
        "classifier.dense": f"{_HEAD}.transform.dense",
        "classifier.norm": f"{_HEAD}.transform.LayerNorm",
        "classifier.next": "cls.seq_relationship",
    }
    found: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in pairs.items()}
    for number in range(len(model.encoders)):
        ours, theirs = f"encoders.{number}", f"bert.encoder.layer.{number}"
        layers |= {
            f"{ours}.attention.out": f"{theirs}.attention.output.dense",
            f"{ours}.attention_norm": f"{theirs}.attention.output.LayerNorm",
            f"{ours}.feed_forward.wide": f"{theirs}.intermediate.dense",
            f"{ours}.feed_forward.out": f"{theirs}.output.dense",
            f"{ours}.norm": f"{theirs}.output.LayerNorm",
        }
        for kind in ("weight", "bias"):
            found[f"{ours}.attention.qkv.{kind}"] = tuple(f"{theirs}.attention.self.{part}.{kind}" for part in _QKV)
    for ours, theirs in layers.items():
        found |= {f"{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias")}
    return found


def config_of(model: Bert) -> dict[str, Any]:
    """Return the content of `config.json` for the model."""
    section = model.section
    layers, hidden, heads = section.shape
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": model.vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": section.num_inner,
        "hidden_act": exported_activation(section.activation),
        "hidden_dropout_prob": section.dropout,
        "attention_probs_dropout_prob": section.attention_dropout,
        "max_position_embeddings": section.max_positions,
        "type_vocab_size": section.segments,
        "initializer_range": section.init_std,
        "layer_norm_eps": section.norm_eps,
        "pad_token_id": 0,
        "tie_word_embeddings": section.tied,
    }


def to_huggingface(model: Bert) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the content of config.json, the tensors by their names there)."""
    params = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for ours, theirs in names(model).items():
        parts = params[ours].detach().chunk(len(theirs))
        tensors |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    tensors.setdefault(f"{_HEAD}.bias", params["classifier.bias"].detach().clone())  # not tied: exists there, unused
    return config_of(model), tensors


def from_huggingface(model: Bert, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights of a `BertForPreTraining`; if they do not fit, raise UserError and change nothing."""
    there, here, section = model_of(config), _keys(model), model.section
    for key, value in there.keys.items():
        if key != "tied" and here[key] != value:
            raise UserError(
                f"config.json has {there.names[key]} = {config.get(there.names[key], value)}, but the model of the "
                f"recipe has {here[key]}: set workload.model.{key}={value}"
            )
    decoder = (f"{_HEAD}.decoder.weight", f"{_HEAD}.decoder.bias")
    if section.tied and (not there.keys["tied"] or not all(_is_tied(tensors, name) for name in decoder)):
        raise UserError("the weights to start from have a decoder of their own: set workload.model.tied=false")
    params = dict(model.named_parameters())
    found = {name: torch.cat([_tensor(tensors, part) for part in parts]) for name, parts in names(model).items()}
    for name, tensor in found.items():
        if tensor.shape != params[name].shape:
            raise UserError(
                f"{names(model)[name][0]} is {list(tensor.shape)}, but the model of the recipe has "
                f"{list(params[name].shape)} there"
            )
    with torch.no_grad():
        for name, tensor in found.items():
            params[name].copy_(tensor)
    used = {part for parts in names(model).values() for part in parts} | {*decoder, f"{_HEAD}.bias", _PLACES}
    used |= {name.replace(new, old) for name in used for new, old in _OLD_NAMES.items()}
    tell_what_differs(there, here, tensors.keys() - used)


def _keys(model: Bert) -> dict[str, Any]:
    """Return the keys of `workload.model` with the values that count."""
    section = model.section
    layers, hidden, heads = section.shape
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "inner": section.num_inner}
    return {**section.model_dump(), **sizes, "vocabulary": model.vocabulary}


def _is_tied(tensors: Mapping[str, Tensor], name: str) -> bool:
    """Return whether a tensor that may be left out is left out, or equals the other that it stands for."""
    other = tensors.get(_TIED_TO[name])
    return name not in tensors or (other is not None and torch.equal(tensors[name], other))


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    old = next((name.replace(new, old) for new, old in _OLD_NAMES.items() if new in name), name)
    for candidate in (name, old):
        if candidate in tensors:
            return tensors[candidate]
    if name in _TIED_TO:
        return _tensor(tensors, _TIED_TO[name])
    raise UserError(f"the file has no tensor {name}: expected the weights of a BertForPreTraining")
