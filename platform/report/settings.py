"""The resolved configuration as a page shows it: what differs from the defaults, then all of it."""

from collections.abc import Mapping
from typing import Any

import yaml

from eagleray.platform.config import ProjectConfig, resolved_json
from eagleray.platform.report.wording import parameter

_MISSING = object()


def changed_settings(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(dotted path, value, default) of what differs from the defaults; the name does not count."""
    defaults = dict(_flat(_defaults(config), ""))
    changed = []
    for path, value in _flat(config, ""):
        default = defaults.get(path, _MISSING)
        if path != "name" and value != default:
            shown = "" if default is _MISSING else parameter(default)
            changed.append((path, parameter(value), shown))
    return changed


def as_yaml(config: Mapping[str, Any]) -> str:
    """The whole configuration in the order of its sections."""
    ordered = _ordered(config, _defaults(config))
    text: str = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=100)
    return text


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    # model_construct: a stored name need not satisfy today's rules to be compared.
    return resolved_json(ProjectConfig.model_construct(name=str(config.get("name", ""))))


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and path not in ("tune.space", "tune.overrides"):
            found += _flat(value, f"{path}.")
        else:
            found.append((path, value))
    return found


def _ordered(tree: Any, like: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    known = [key for key in like if key in tree] if isinstance(like, Mapping) else []
    keys = [*known, *(key for key in tree if key not in known)]
    return {key: _ordered(tree[key], like.get(key) if known else None) for key in keys}
