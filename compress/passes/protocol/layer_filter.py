"""Passes on some of the layers: a filter more, which layers have to get through beside those the pass has."""

from dataclasses import replace
from typing import TypeVar

from compress.passes.protocol.base import Filter, Pass

P = TypeVar("P", bound=Pass)


def only(inner: P, *patterns: str) -> P:
    """The pass on the layers that match: `only(GPTQ(scheme="w3a16"), "*.mlp.*")`."""
    return replace(inner, where=(*inner.where, Filter("only", patterns)))


def but(inner: P, *patterns: str) -> P:
    """The pass on the layers that do not match: `but(RTN(), "*.down_proj")`, or `but(RTN(), "re:.*down_proj")`."""
    return replace(inner, where=(*inner.where, Filter("but", patterns)))
