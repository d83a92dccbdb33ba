"""A Serve YAML, checked before anything starts. Serve itself ignores keys that it does not know."""

from __future__ import annotations

import difflib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from paceline.cli.autoscaling_keys import autoscaling_problems
from paceline.config import AppConfig, Pool
from paceline.config.live import check_user_config
from paceline.config.names import DRAFTS, deployment_kind
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

# Of PyYAML's own, and what its constructors raise for values that do not fit their tags.
YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError)
BUILDER = "paceline.app:build_app"


@dataclass(frozen=True, slots=True)
class ServeFile:
    """`apps` are the parsed `args` of the applications that Paceline builds."""

    path: Path
    schema: ServeDeploySchema
    apps: tuple[AppConfig, ...]

    @property
    def sources(self) -> list[str]:
        """Every model that the file names, once, targets first."""
        models = [pool.config.target.model.source for pool in self.pools]
        models += [p.config.draft.model.source for p in self.pools if p.offer.has_drafts]
        return list(dict.fromkeys(models))

    @property
    def pools(self) -> list[Pool]:
        """Those of all applications."""
        return [pool for app in self.apps for pool in app.pools]

    @property
    def needs_key(self) -> bool:
        """Whether requests must carry an API key."""
        return bool(self.apps[0].gateway.api_keys)

    @property
    def served_model_name(self) -> str:
        return self.apps[0].gateway.served_model_name

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """Of the first application, which is the one that is waited for: models and adapters."""
        return self.apps[0].served_model_names


def load(path: Path) -> ServeFile:
    """Parse and check `path`; `ConfigError` names the file and each wrong key."""
    from ray.serve.schema import ServeDeploySchema  # imports Ray: a second

    data = _read_yaml(path)
    problems = [f"unknown key {key}" for key in unknown_keys(ServeDeploySchema, data)]
    try:
        schema = ServeDeploySchema.model_validate(data)
    except ValidationError as error:
        problems += validation_problems(error)
        raise ConfigError(f"{path}: {'; '.join(problems)}") from error
    except Exception as error:  # Ray's own validators trip over values of unexpected types
        problems.append(f"no Serve config ({type(error).__name__}: {error})")
        raise ConfigError(f"{path}: {'; '.join(problems)}") from error
    apps: list[AppConfig] = []
    for index, application in enumerate(schema.applications):
        if application.import_path != BUILDER:
            continue
        problems += autoscaling_problems(application, f"applications.{index}")
        try:
            apps.append(AppConfig.model_validate(application.args))
        except ValidationError as error:
            problems += validation_problems(error, f"applications.{index}.args")
        else:
            problems += _unknown_deployments(application, apps[-1], f"applications.{index}")
            problems += _user_config_problems(application, apps[-1], f"applications.{index}")
    if not problems and not apps:
        problems.append(f"no application has import_path {BUILDER}")
    if problems:
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    return ServeFile(path, schema, tuple(apps))


def _unknown_deployments(
    application: ServeApplicationSchema, app: AppConfig, where: str
) -> list[str]:
    """What Serve would refuse when everything else has started."""
    problems = []
    for deployment in application.deployments:
        if deployment.name in app.deployments:
            continue
        kind, suffix = deployment_kind(deployment.name)
        if kind == DRAFTS and any(pool.suffix == suffix for pool in app.pools):
            hint = _no_drafts(next(p for p in app.pools if p.suffix == suffix))
        else:
            close = difflib.get_close_matches(deployment.name, app.deployments, n=1)
            hint = (
                f"did you mean {close[0]}?" if close else f"there are {', '.join(app.deployments)}"
            )
        problems.append(f"{where}: no deployment is called {deployment.name} ({hint})")
    return problems


def _no_drafts(pool: Pool) -> str:
    """Why there are no draft replicas, and what to do about it."""
    if pool.config.draft.deploy == "never":
        return "there are no drafts where draft.deploy is never: leave it out"
    method = pool.config.speculation.method
    why = f"there are no drafts where speculation.method is {method}: leave it out"
    return why if method == "off" else f"{why}, or set draft.deploy: always"


def _user_config_problems(
    application: ServeApplicationSchema, app: AppConfig, where: str
) -> list[str]:
    """What replicas would refuse at their start, minutes later."""
    problems = []
    for deployment in application.deployments:
        if "user_config" not in deployment.model_fields_set or deployment.user_config is None:
            continue
        if deployment.name not in app.deployments:
            continue  # said already
        prefix = f"{where}.{deployment.name}.user_config"
        try:
            check_user_config(deployment.name, deployment.user_config, app)
        except ValidationError as error:
            problems += validation_problems(error, prefix)
        except ValueError as error:
            problems.append(f"{prefix}: {error}")
    return problems


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except YAML_ERRORS as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a Serve config: expected a mapping with `applications`")
    return data


def validation_problems(error: ValidationError, prefix: str = "") -> list[str]:
    """One short phrase per problem, with the dotted path of the key."""
    problems = []
    for item in error.errors():
        path = ".".join(part for part in (prefix, *map(str, item["loc"])) if part)
        unknown = item["type"] == "extra_forbidden"
        said = item["msg"].removeprefix("Value error, ")
        problems.append(f"unknown key {path}" if unknown else f"{path}: {said}")
    return problems


def unknown_keys(model: type[BaseModel], data: object, path: str = "") -> list[str]:
    """Dotted paths of keys that `model` and the models inside it do not have."""
    if not isinstance(data, dict):
        return []
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    problems = []
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            problems.append(where + (f" (did you mean {close[0]}?)" if close else ""))
            continue
        for nested in _models_in(fields[key]):
            items = enumerate(value) if isinstance(value, list) else ((None, value),)
            for index, item in items:
                inner = where if index is None else f"{where}.{index}"
                problems += unknown_keys(nested, item, inner)
    return problems


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models in `X`, `list[X]`, `Optional[X]` or `dict | X`."""
    if get_origin(annotation) in (Union, types.UnionType, list):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_model else []
