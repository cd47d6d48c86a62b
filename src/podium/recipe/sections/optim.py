"""The `optim` section: the optimiser, its learning rate and how the rate grows with the batch.

`optim/optimisers.py` builds the optimiser, `optim/lr_scaling.py` scales the rate.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from podium.recipe.section import OwnName, Section, is_own_name

Scale = Literal["none", "sqrt", "linear"]


def contradiction(lr: float | None, lr_exponent: int | None, scale: Scale, base_batch: int | None) -> str | None:
    """Return a sentence about contradictory values, or None."""
    if lr is None and lr_exponent is None:
        return "optim.lr is missing: give it or optim.lr_exponent"
    if lr is not None and lr_exponent is not None:
        return "optim.lr and optim.lr_exponent contradict each other: give one and set the other to null"
    if lr_exponent is not None and scale != "none":
        return f"optim.scale = {scale}: expected none with optim.lr_exponent, which already grows with the global batch"
    if scale != "none" and base_batch is None:
        return f"optim.base_batch is missing: optim.scale = {scale} needs the global batch that optim.lr was tuned for"
    return None


#: the keys of each optimiser with their defaults
KEYS: dict[str, dict[str, Any]] = {
    "sgd": {"weight_decay": 0.0},
    "momentum": {"weight_decay": 0.0, "momentum": 0.9},
    "nesterov": {"weight_decay": 0.0, "momentum": 0.9},
    "rmsprop": {"weight_decay": 0.0, "momentum": 0.0, "decay": 0.99, "eps": 1e-8},
    "rmsprop_tf": {"weight_decay": 0.0, "momentum": 0.0, "decay": 0.9, "eps": 1e-10},
    "adam": {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
    "lars": {"weight_decay": 0.0, "momentum": 0.9, "eeta": 0.001, "eps": 0.0},
    "lamb": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "bias_correction": True},
}
#: those of a user's own class; null: its own default
_OWN_KEYS: dict[str, Any] = {"weight_decay": None, "options": {}}
_ALL_KEYS = tuple(dict.fromkeys(key for keys in (*KEYS.values(), _OWN_KEYS) for key in keys))


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys of an optimiser with their defaults."""
    return _OWN_KEYS if is_own_name(name) else KEYS[name]


Coefficient = Annotated[float, Field(ge=0, lt=1)]


class GroupSection(Section):
    """One of `optim.groups`: parameters, as patterns that match their names, with a rate or weight decay of their own.

    A parameter belongs to the first group that matches it.
    """

    params: str | list[str]
    lr: float | None = Field(None, gt=0, description="learning rate, where optim.lr is that of the others")
    lr_scale: float | None = Field(None, gt=0, description="instead of lr: a multiple of the others' rate")
    weight_decay: float | None = Field(None, ge=0, description="weight decay, whatever the kind of the parameter")

    @property
    def patterns(self) -> list[str]:
        return [self.params] if isinstance(self.params, str) else self.params

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.lr is not None and self.lr_scale is not None:
            raise ValueError("optim.groups: lr and lr_scale contradict each other: give one of them")
        if self.lr is None and self.lr_scale is None and self.weight_decay is None:
            raise ValueError(f"optim.groups: {self.params} has neither lr, lr_scale nor weight_decay")
        return self


class OptimSection(Section):
    """`optim`: the optimiser and its learning rate. Keys that belong to other optimisers stay null."""

    name: Literal["sgd", "momentum", "nesterov", "rmsprop", "rmsprop_tf", "adam", "adamw", "lars", "lamb"] | OwnName
    options: dict[str, Any] | None = Field(
        None, description="keyword arguments of an optimiser of your own, as in mine.py:Lion"
    )
    lr: float | None = Field(None, gt=0, description="learning rate; at base_batch when scale is not none")
    scale: Scale = Field("none", description="how lr grows with global batch / base_batch")
    base_batch: int | None = Field(None, gt=0, description="the global batch that lr was tuned for")
    lr_exponent: int | None = Field(
        None, ge=-60, le=10, description="instead of lr: the learning rate is 2^lr_exponent times the global batch"
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        description="adamw, lamb: decoupled (0.01); all others: added to the gradient (0); your own: as its class does",
    )
    decay_all: bool = Field(
        False,
        description="weight decay (lars, lamb: and the trust ratio) on all parameters, including biases and norms",
    )
    no_decay: list[str] = Field(
        [], description="more parameters without weight decay or trust ratio, as patterns that match their names"
    )
    freeze: list[str] = Field([], description="parameters that are not trained, as patterns that match their names")
    groups: list[GroupSection] = Field([], description="parameters with a rate or weight decay of their own")
    momentum: Coefficient | None = Field(None, description="momentum, nesterov, lars (0.9); rmsprop (0)")
    betas: tuple[Coefficient, Coefficient] | None = Field(None, description="adam, adamw, lamb (0.9, 0.999)")
    decay: Coefficient | None = Field(
        None, description="rmsprop: decay of the running mean square (0.99; TensorFlow form 0.9)"
    )
    eps: float | None = Field(
        None, ge=0, description="adam, adamw, rmsprop (1e-8); rmsprop_tf (1e-10); lamb (1e-6); lars (0)"
    )
    eeta: float | None = Field(None, gt=0, description="lars: coefficient of the trust ratio (0.001)")
    bias_correction: bool | None = Field(
        None, description="lamb: correct the bias of the running means in the first steps (true)"
    )
    clip_norm: float | None = Field(None, gt=0, description="maximum global norm of the mean gradient")

    @classmethod
    def overruled(cls, inherited: Mapping[str, Any], written: Mapping[str, Any]) -> list[str]:
        """Return the inherited keys that do not apply to another optimiser, or to another way to give the rate."""
        keys = []
        name = written.get("name")
        if isinstance(name, str) and name != inherited.get("name") and (name in KEYS or is_own_name(name)):
            keys = [key for key in _ALL_KEYS if key not in keys_of(name) or key == "options"]
            keys += ["eps"] if inherited.get("eps") == 0 and name != "lars" else []
        if written.get("lr") is not None:
            keys.append("lr_exponent")
        if written.get("lr_exponent") is not None:
            keys += ["lr", "scale", "base_batch"]
        return keys

    @model_validator(mode="after")
    def _keys_fit_the_optimiser(self) -> Self:
        for key in _ALL_KEYS:
            if getattr(self, key) is not None and key not in keys_of(self.name):
                advice = "leave it out or set it to null"
                if (self.name, key) == ("sgd", "momentum"):
                    advice = "use optim.name=momentum or nesterov"
                if is_own_name(self.name):
                    advice = f"give it as optim.options.{key}"
                raise ValueError(f"optim.{key} does not apply to {self.name}: {advice}")
        if self.eps == 0 and self.name != "lars":
            raise ValueError(f"optim.eps = 0: expected a number greater than 0 with {self.name}")
        for key in ("params", "lr", "weight_decay"):
            if key in (self.options or {}):
                instead = "the model's own are trained" if key == "params" else f"give optim.{key}"
                raise ValueError(f"optim.options.{key} is not an option: {instead}")
        if self.lr is None and any(group.lr is not None for group in self.groups):
            raise ValueError("optim.groups: lr does not apply to a recipe with optim.lr_exponent: use lr_scale")
        if problem := contradiction(self.lr, self.lr_exponent, self.scale, self.base_batch):
            raise ValueError(problem)
        return self

    def lr_scale(self, group: GroupSection) -> float:
        """Return the rate of a group as a multiple of the others'."""
        if group.lr is None:
            return 1.0 if group.lr_scale is None else group.lr_scale
        assert self.lr is not None
        return group.lr / self.lr

    def value(self, key: str) -> Any:
        """Return the key as given, or its default for the named optimiser."""
        given = getattr(self, key)
        return keys_of(self.name)[key] if given is None else given
