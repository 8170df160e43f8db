"""The JSON schema of policy files, from the types that reading them checks; as a script it writes the schema."""

import dataclasses
import json
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import vbtta
from vbtta.inference.laplace import PROFILE_GRID
from vbtta.models.base import MODELS, Model
from vbtta.models.parts.label_noise import NOISES
from vbtta.models.parts.links import LINKS
from vbtta.policy import FILE_FIELDS, FILE_KEYS, Policy

FILE = Path(__file__).resolve().parents[1] / "reference" / "policy.schema.json"
_PLAIN = {float: "number", int: "integer", bool: "boolean", str: "string"}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_NAMED = {"type": ["string", "number", "boolean"]}
_ENGINES = ("EM", "ADVI")
_NONEMPTY = "KCVMD"  # axes that no policy lacks
_OPTIONS: dict[str, Any] = {  # what annotations of records do not say
    "tol": _SHARE,
    "offset_scale": {"type": "number", "minimum": 0},
    "alpha": {"type": ["number", "null"]},
    "levels": {"anyOf": [{"type": "null"}, {"type": "array", "items": _NAMED, "minItems": 2, "uniqueItems": True}]},
    "CategoricalMixture link": {"enum": list(LINKS)},
    "CategoricalLatent link": {"enum": list(LINKS)},
    "CategoricalMixture noise": {"enum": [None, *NOISES]},
    "CategoricalLatent noise": {"enum": [None, *NOISES]},
}
_FIELDS: dict[str, Any] = {  # likewise of the records of a posterior
    "link": {"enum": list(LINKS)},
    "NoiseModel kind": {"enum": [name for name, noise in NOISES.items() if noise is not None]},
    "n_classes": {"type": "integer", "minimum": 2},
    "OrdinalPosterior levels": {"type": "array", "items": _NAMED, "minItems": 2, "uniqueItems": True},
}
_ITEMS: dict[str, Any] = {  # and of the numbers in its arrays
    "MixtureState weights": _SHARE,
    "CategoricalPosterior weights": _SHARE,
    "SampledCategoricalPosterior weights": _SHARE,
    "OrdinalPosterior weights": _SHARE,
    "RankingPosterior weights": _SHARE,
    "class_weights": _SHARE,
    "FittedNoise counts": _POSITIVE,
    "FittedNoise strength": _POSITIVE,
    "FittedNoise levels": _POSITIVE,
    "kept": {"type": "integer", "minimum": 0},
}


def policy_schema() -> dict[str, Any]:
    """The schema; finite numbers need no words in it, since JSON has no others."""
    definitions: dict[str, Any] = {}
    hints = get_type_hints(Policy, include_extras=True)
    fields = {FILE_KEYS.get(name, name): _schema(hints[name], definitions) for name in FILE_FIELDS}
    fields["views"] |= {"minItems": 1, "uniqueItems": True}
    fields["fitted"] |= {"uniqueItems": True}
    fields["n_outputs"] |= {"minimum": 1}
    policy = {
        "task": {"enum": sorted({entry.task for entry in MODELS.values() if entry.task} | {"multilabel"})},
        "weights": {"type": "array", "items": _SHARE, "minItems": 1},
        "elbo": {"type": ["number", "null"]},
        **fields,
        "classes": {"type": ["array", "null"], "items": _NAMED},
        "posterior": {"type": "object"},
        "model": {"$ref": "#/$defs/model"},
        "engine": {"$ref": "#/$defs/engine"},
    }
    file = {
        "format": {"const": "vbtta-policy"},
        "version": {"const": 1},
        "vbtta": {"type": "string"},
        "checksum": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    }
    kinds = [name for name in MODELS if name != "Stack"]
    definitions |= {"model": _record([*kinds, "Stack"]), "single": _record(kinds), "engine": _record(_ENGINES)}
    definitions |= {name: _options(name) for name in (*MODELS, *_ENGINES)}
    definitions["policy"] = {
        "type": "object",
        "required": list(policy),
        "properties": policy,
        "allOf": _rules(definitions),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vbtta policy, version 1",
        "description": "Arrays of several axes are lists of lists of equal lengths, which a schema cannot say.",
        "required": [*file, *policy],
        "properties": {**file, **dict.fromkeys(policy, True)},
        "$ref": "#/$defs/policy",
        "$defs": dict(sorted(definitions.items())),
    }


def _rules(definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """Task and posterior, as model and engine decide them."""
    shares = {"type": "array", "items": {**_POSITIVE, "maximum": 1}, "minItems": 1}
    definitions["StackedPosterior"] = {
        "type": "object",
        "required": ["members", "member_weights", "covariance"],
        "properties": {
            "members": {"type": "array", "items": {"$ref": "#/$defs/policy"}, "minItems": 1},
            "member_weights": shares,
            "covariance": _numbers("M M", {"type": "number"}),
        },
    }
    stacked = _rule({"model": _kind("Stack")}, {"posterior": {"$ref": "#/$defs/StackedPosterior"}})
    rules = [stacked | {"else": {"properties": {"elbo": {"type": "number"}}}}]
    several = _rule({"task": {"const": "multilabel"}}, {"multilabel": {"const": True}})
    rules.append(several | {"else": {"properties": {"multilabel": {"const": False}}}})
    for name, entry in MODELS.items():
        if not entry.task:
            continue
        tasks = [entry.task, *(["multilabel"] if entry.task == "classification" else [])]
        rules.append(_rule({"model": _kind(name)}, {"task": {"enum": tasks}}))
        sampled = f"Sampled{entry.posterior}" if entry.closed else entry.posterior
        for engine, posterior in zip(_ENGINES, (entry.posterior if entry.closed else "", sampled), strict=True):
            if posterior:
                kind = getattr(import_module(f"vbtta.models.{entry.folder}.posterior"), posterior)
                condition = {"model": _kind(name), "engine": _kind(engine)}
                rules.append(_rule(condition, {"posterior": _schema(kind, definitions)}))
    return rules


def _rule(condition: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": condition}, "then": {"properties": then}}


def _kind(name: str) -> dict[str, Any]:
    return {"properties": {"kind": {"const": name}}}


def _record(kinds: Sequence[str]) -> dict[str, Any]:
    """A model or engine: its kind, and the options of that kind."""
    options = [{"if": _kind(kind), "then": {"$ref": f"#/$defs/{kind}"}} for kind in kinds]
    return {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": list(kinds)}}, "allOf": options}


def _options(name: str) -> dict[str, Any]:
    kind = getattr(vbtta, name)
    hints = get_type_hints(kind)
    options = {}
    for field in dataclasses.fields(kind):
        known = _OPTIONS.get(f"{name} {field.name}", _OPTIONS.get(field.name))
        options[field.name] = _option(hints[field.name]) if known is None else known
    return {"properties": {"kind": {}, **options}, "additionalProperties": False}


def _option(hint: Any) -> dict[str, Any]:
    """What a file holds of an option: functions are named, records have their kind."""
    origin = get_origin(hint)
    if hint is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_option(each) for each in get_args(hint)]}
    if origin is Callable:
        return {"type": "string"}
    if origin is tuple and get_args(hint)[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": list(map(_option, get_args(hint))), "minItems": len(get_args(hint))}
    if origin in (tuple, Sequence):
        return {"type": "array", "items": _option(get_args(hint)[0])}
    if isinstance(hint, type) and issubclass(hint, Model):
        return {"$ref": "#/$defs/single"}
    return {float: _POSITIVE, int: {"type": "integer", "minimum": 1}}.get(hint) or {"type": _PLAIN[hint]}


def _schema(hint: Any, definitions: dict[str, Any], field: str = "", record: str = "") -> dict[str, Any]:
    """What :func:`vbtta._support.files.from_plain` takes for a type, here that of a record's field."""
    origin = get_origin(hint)
    known = _FIELDS.get(f"{record} {field}", _FIELDS.get(field))
    if known is not None:
        return known  # type: ignore[no-any-return]
    if origin in (Union, types.UnionType):
        [inner] = [each for each in get_args(hint) if each is not type(None)]
        return {"anyOf": [{"type": "null"}, _schema(inner, definitions, field, record)]}
    if origin is Annotated:
        items = _ITEMS.get(f"{record} {field}", _ITEMS.get(field, {"type": "number"}))
        return _numbers(hint.__metadata__[0], items)
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(get_args(hint)[1], definitions)}
    if origin is tuple:
        return {"type": "array", "items": _schema(get_args(hint)[0], definitions)}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # until its fields are known
        hints = {name: each for name, each in get_type_hints(hint, include_extras=True).items() if name[0] != "_"}
        definitions[hint.__name__] = {
            "type": "object",
            "required": [name for name in hints if name not in getattr(hint, "_field_defaults", {})],
            "properties": {name: _schema(each, definitions, name, hint.__name__) for name, each in hints.items()},
        }
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _numbers(shapes: str, items: dict[str, Any]) -> dict[str, Any]:
    """Nested lists of numbers, as deep as there are axes; those of digits have that length."""
    options = []
    for shape in shapes.split("|"):
        schema = items
        for axis in reversed(shape.split()):
            schema = {"type": "array", "items": schema}
            length = len(PROFILE_GRID) if axis == "G" else int(axis) if axis.isdigit() else None
            if length is not None:
                schema |= {"minItems": length, "maxItems": length}
            elif axis in _NONEMPTY:
                schema |= {"minItems": 1}
        options.append(schema)
    return options[0] if len(options) == 1 else {"anyOf": options}


def laid_out(value: Any, indent: int = 0) -> str:
    """JSON in lines of at most 120 letters, where values allow it."""
    line = json.dumps(value)
    if len(line) + indent < 115 or not isinstance(value, dict | list) or not value:
        return line
    entries = [("", entry) for entry in value]
    if isinstance(value, dict):
        entries = [(f"{json.dumps(key)}: ", entry) for key, entry in value.items()]
    inner = ",\n".join(f"{' ' * (indent + 2)}{key}{laid_out(entry, indent + 2)}" for key, entry in entries)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}\n{' ' * indent}{closing}"


if __name__ == "__main__":
    FILE.write_text(laid_out(policy_schema()) + "\n", encoding="utf-8")
