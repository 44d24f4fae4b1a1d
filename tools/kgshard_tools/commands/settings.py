"""The settings of a training as options, for every command that takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from kgshard.config import DEFAULTS, TrainConfig, option, parse_setting, read_settings

_GROUPS = {
    "model": "Model",
    "epochs": "Training",
    "train_type": "Loss and negatives",
    "n3": "Regularisers",
    "optimizer": "Optimizer",
    "eval_every": "Evaluation while training",
    "device": "Devices",
}
"""Headings of the help, each before the setting that it names."""


class SettingsCommand(click.Command):
    """A command whose many options are listed under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        heading = "Options"
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_setting = parameter.name in TrainConfig.__dataclass_fields__
            heading = _GROUPS.get(parameter.name or "", heading) if is_setting else "Options"
            if record is not None:
                groups.setdefault(heading, []).append(record)
        for name in (*_GROUPS.values(), "Options"):
            with formatter.section(name):
                formatter.write_dl(groups[name])


def settings_options(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what adds --config, --set and an option for each setting to a command.

    The command gets them as `settings`, a TrainConfig. Its name (in capitals) is in its variables.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        @click.option(
            "--config",
            type=click.Path(path_type=Path),
            help="A TOML file of settings: a recipe, a run's config.toml.",
        )
        @click.option(
            "--set",
            "assignments",
            multiple=True,
            envvar=f"KGSHARD_{command}_SET",
            metavar="NAME=VALUE",
            help="A setting, by its name.",
        )
        @_each_setting
        @functools.wraps(function)
        def wrapped(*args: Any, config: Path | None, assignments: tuple[str, ...], **options: Any) -> None:
            given = {name: options.pop(name) for name in DEFAULTS}
            function(*args, settings=_read(config, assignments, given), **options)

        return wrapped

    return add


def _read(config: Path | None, assignments: tuple[str, ...], options: dict[str, Any]) -> TrainConfig:
    """Return settings from a file, assignments and options; the last one holds."""
    given = dict(map(parse_setting, assignments))
    given |= {name: value for name, value in options.items() if value is not None}
    recipe = read_settings(config) if config is not None else {}
    settings = TrainConfig.from_dict(recipe | given)
    # Back to its default: that turns off what a recipe says, whether it means anything here or not.
    settings.check_applies(
        [name for name, value in given.items() if value != DEFAULTS[name] or name not in recipe]
    )
    return settings


def _each_setting(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of TrainConfig, which checks values; one that was not given is None."""
    for declared in reversed(fields(TrainConfig)):
        command = _option(declared)(command)
    return command


def _option(declared: Field[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    spelling, default = option(declared.name), declared.default
    is_flag = isinstance(default, bool)
    shown = ("on" if default else "off") if is_flag else default
    return click.option(
        f"{spelling}/--no-{spelling[2:]}" if is_flag else spelling,
        declared.name,
        type=None if is_flag else type(default),
        default=None,
        metavar="|".join(declared.metadata["choices"]) or None,
        help=f"{declared.metadata['help']}  [default: {shown}]",
    )
