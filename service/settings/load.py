"""From a YAML file and the environment to Settings. Every error names the key and what to do."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from torpor.service.settings.shape import Settings

ENVIRONMENT_PREFIX = "TORPOR_"
DEFAULT_TREE: dict[str, Any] = {
    "models": [{"name": "smollm2", "kv_cache": {"gpu_bytes": "512MiB", "host_bytes": "1GiB"}}],
    "host_pool": {"bytes": "1GiB"},
}


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML's loaders keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    fault = f"the key '{key.value}' stands twice; keep one of them"
                    raise yaml.constructor.ConstructorError(None, None, fault, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class SettingsError(Exception):
    """The configuration cannot be used; `problems` has one line a fault, each naming its key."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.problems = problems


def load_settings(file: Path | None, environment: Mapping[str, str]) -> Settings:
    """The file's keys (None: the default small model), overridden by TORPOR_… variables.

    A relative engine.model or auth.tokens_file is looked up beside the file. Raises SettingsError.
    """
    source = str(file) if file else "settings"
    tree = copy.deepcopy(DEFAULT_TREE) if file is None else _read(file)
    problems = _merge_environment(tree, environment)
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(source, problems + _lines(error.errors())) from None
    if problems:
        raise SettingsError(source, problems)
    base = file.parent if file else Path()
    return _with_absolute_tokens_file(_with_absolute_models(settings, base), base)


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(str(file), [f"cannot be read ({reason}); give an existing file"]) from None
    except UnicodeDecodeError:
        raise SettingsError(str(file), ["is not UTF-8 text; give a YAML file"]) from None
    try:
        tree = yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(str(file), [_no_yaml(error)]) from None
    if not isinstance(tree, dict):
        raise SettingsError(str(file), ["holds no keys; it needs at least `models:` with one model"])
    return tree


def _no_yaml(error: Exception) -> str:
    """In one line. Of a ValueError, such as a date that there is not, and of brackets in brackets in …, too."""
    if not isinstance(error, yaml.YAMLError):
        return f"is not valid YAML: {error}"
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}" if mark else ""
    return f"is not valid YAML{where}: {getattr(error, 'problem', None) or 'syntax error'}"


def _merge_environment(tree: dict[str, Any], environment: Mapping[str, str]) -> list[str]:
    """TORPOR_HTTP__PORT=8701, TORPOR_MODELS__0__VERIFY=true: `__` goes a level down, a number into a list.

    A name without `__` counts only when it is a whole section (TORPOR_MODELS as YAML or JSON); others (such
    as TORPOR_DEFAULT_MODEL) belong to somebody else.
    """
    problems = []
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        path = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if len(path) == 1 and path[0] not in Settings.model_fields:
            continue
        try:
            value = yaml.load(environment[variable], _StrictLoader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            problems.append(f"{variable}: {_no_yaml(error)}")
            continue
        try:
            _put(tree, path, value)
        except (LookupError, ValueError) as error:
            problems.append(f"{variable}: {error}")
    return problems


def _put(tree: dict[str, Any], path: list[str], value: object) -> None:
    node: Any = tree
    for depth, name in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            if not name.isdigit() or int(name) > len(node):
                raise ValueError(f"{name!r} is no index into {'.'.join(path[:depth])} (0 to {len(node)})")
            index = int(name)
            if index == len(node):
                node.append({})
            if last:
                node[index] = value
            node = node[index]
        elif isinstance(node, dict):
            if last:
                node[name] = value
            elif node.get(name) is None:
                node[name] = [] if path[depth + 1].isdigit() else {}
            node = node[name]
        else:
            raise ValueError(f"{'.'.join(path[:depth])} has a plain value and nothing below it")


def _lines(faults: Sequence[Any]) -> list[str]:
    """A list whose entries are all wrong is not empty besides."""
    inside = {fault["loc"][0] for fault in faults if len(fault["loc"]) > 1}
    return [_line(fault) for fault in faults if fault["type"] != "too_short" or fault["loc"][0] not in inside]


_PLAIN_WORDS = {
    "extra_forbidden": "no such key; remove it or correct its spelling",
    "missing": "is missing; set it",
    "tuple_type": "must be a list, one entry each",
    "too_short": "is empty; it needs at least 1 entry",
    "model_type": "must hold keys of its own, as the README shows",
    "string_type": "must be text; put it in quotes",
    "int_type": "must be an integer",
    # Of models and of the namespace, the only texts that have one.
    "string_pattern_mismatch": "must be at most 64 letters, digits, '.', '_' and '-', a letter or digit first",
}


def _line(fault: Any) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    message = _PLAIN_WORDS.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def _with_absolute_models(settings: Settings, base: Path) -> Settings:
    models = []
    for model in settings.models:
        if model.engine.model:
            path = (base / Path(model.engine.model).expanduser()).resolve()
            model = model.model_copy(update={"engine": model.engine.model_copy(update={"model": str(path)})})
        models.append(model)
    return settings.model_copy(update={"models": tuple(models)})


def _with_absolute_tokens_file(settings: Settings, base: Path) -> Settings:
    """Links are left alone: a Secret's are swapped while the service runs."""
    if settings.auth.tokens_file is None:
        return settings
    path = (base / Path(settings.auth.tokens_file).expanduser()).absolute()
    return settings.model_copy(update={"auth": settings.auth.model_copy(update={"tokens_file": str(path)})})
