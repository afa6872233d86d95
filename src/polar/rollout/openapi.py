"""The OpenAPI page, from the table of routes. JSON schemas are the contract's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

import polar
from polar.contract.task import ID_PATTERN
from polar.rollout.http import Query, Route

_REASONS = {
    200: "Done.",
    401: "The credential is missing or unknown.",
    403: "The credential's role may not do this.",
    404: "There is none of that id.",
    409: "It contradicts what is there.",
    413: "The body is too large.",
    422: "The request is not valid; the line says what to change.",
    503: "The database can't be used now; try again.",
    504: "It did not happen in time.",
}


class Failure(msgspec.Struct):
    """What every error says, in one line."""

    detail: str


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    kinds = [kind for route in routes for kind in (route.body, route.answer) if kind and not _is_media(kind)]
    schemas, components = msgspec.json.schema_components(
        [*kinds, Failure], schema_hook=_arrays, ref_template="#/components/schemas/{name}"
    )
    by_kind = {_key(kind): schema for kind, schema in zip([*kinds, Failure], schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Polar control plane", "version": polar.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name.replace(".", "_"),
        "summary": route.about,
        "parameters": [_path_parameter(name) for name in route.ids] + [_parameter(each) for each in route.query],
        "responses": {str(status): _failure(status, schemas) for status in _failures(route)},
    }
    media = route.answer if _is_media(route.answer) else "application/json"
    schema = {"type": "string"} if _is_media(route.answer) else schemas[_key(route.answer)]
    operation["responses"]["200"] = {"description": _REASONS[200], "content": {media: {"schema": schema}}}
    if route.role is not None:
        operation["security"] = [{"token": []}]
        operation["description"] = f"Needs a token of role `{route.role}`."
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.optional_body,
            "content": {"application/json": {"schema": schemas[_key(route.body)]}},
        }
    return operation


def _failures(route: Route) -> set[int]:
    statuses = {503, *route.statuses}
    if route.role is not None:
        statuses |= {401, 403}
    if route.ids:
        statuses |= {404, 422}
    if route.query:
        statuses.add(422)
    if route.body is not None:
        statuses |= {413, 422}
    return statuses


def _failure(status: int, schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": _REASONS[status],
        "content": {"application/json": {"schema": schemas[_key(Failure)]}},
    }


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": ID_PATTERN}}


def _parameter(query: Query) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": {str: "string", int: "integer", float: "number", bool: "boolean"}[query.kind],
    }
    if query.choices:
        schema["enum"] = list(query.choices)
    if query.pattern:
        schema["pattern"] = query.pattern
    if query.kind in (int, float):
        schema |= {"minimum": query.lowest, "maximum": query.highest}
    if query.default is not None:
        schema["default"] = query.default
    return {"name": query.name, "in": "query", "required": False, "description": query.about, "schema": schema}


def _is_media(kind: Any) -> bool:
    return isinstance(kind, str)


def _key(kind: Any) -> str:
    return re.sub(r"\s", "", repr(kind))


def _arrays(kind: Any) -> dict[str, Any]:
    if kind is np.ndarray:
        return {"type": "array", "items": {"type": "number"}}
    raise TypeError(f"{kind} has no JSON schema")
