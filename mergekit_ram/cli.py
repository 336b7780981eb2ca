"""The command ``mergekit-ram``: look at a merge before it is done, and check it after."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions, PrettyPrintHelp, add_merge_options
from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from mergekit_ram import figure, preflight, table
from mergekit_ram._mergekit.commands import Planned, plan_flat_merge, plan_merge
from mergekit_ram.errors import ConfigError, Finding, RamError, collecting
from mergekit_ram.methods import BY_NAME
from mergekit_ram.planning import devices_of
from mergekit_ram.report import OverlapReport
from mergekit_ram.tasks import measure, merges_of, report_on
from mergekit_ram.verification import compare

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A config and how to work on it.

    ``union`` and ``intersection`` are mergekit-pytorch's options of that name.
    """

    path: str
    options: MergeOptions
    union: bool = False
    intersection: bool = False

    @functools.cached_property
    def config(self) -> Any:
        """The parsed config, mergekit-yaml's or mergekit-pytorch's."""
        raw = _yaml(self.path)
        method = raw.get("merge_method")
        if not isinstance(method, str) or method not in BY_NAME:
            raise ConfigError(
                f"{self.path}: merge_method is {method!r}; mergekit-ram looks at "
                f"{', '.join(BY_NAME)}. To see whether RAM suits these models, set it to `ram`."
            )
        schema = RawPyTorchMergeConfig if _names_files(raw) else MergeConfiguration
        try:
            return schema.model_validate(raw)
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'the config'}: {e['msg']}"
                for e in error.errors()
            )
            raise ConfigError(f"{self.path}: {wrong}") from None
        except Exception as error:  # MergeKit's validators raise all kinds
            raise ConfigError(f"{self.path}: {error}") from None

    def plan(self) -> list[Planned]:
        """Plan the merge, as MergeKit's command would, all checks included.

        Raises:
            RamError: it cannot be planned.
        """
        try:
            return self._plan()
        except RamError:
            raise
        except Exception as error:
            LOG.debug("MergeKit's error", exc_info=True)
            raise ConfigError(f"MergeKit cannot plan this merge: {_text_of(error)}") from error

    def _plan(self) -> list[Planned]:
        if isinstance(self.config, MergeConfiguration):
            return plan_merge(self.config, self.options)
        return plan_flat_merge(
            self.config, self.options, union=self.union, intersection=self.intersection
        )


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _yaml(path: str) -> dict[str, Any]:
    try:
        documents = list(yaml.safe_load_all(Path(path).read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ConfigError(
            f"{path} holds {len(documents)} documents; mergekit-ram takes one merge config. "
            "Of a config for mergekit-multi, put one document at a time into a file."
            if len(documents) > 1
            else f"{path} is no merge config: it should have keys like `merge_method:`."
        )
    documents[0].pop("name", None)  # mergekit-multi's
    return documents[0]


_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def _names_files(raw: dict[str, Any]) -> bool:
    """Whether a config's models are files of tensors, as mergekit-pytorch takes them."""
    models = raw.get("models")
    listed = models if isinstance(models, list) else []
    names = [m.get("model") for m in listed if isinstance(m, dict)]
    return any(isinstance(n, str) and (Path(n).is_file() or n.endswith(_FILES)) for n in names)


def _request(command: Callable[..., None]) -> Any:
    """Add the config and MergeKit's options to a command, which gets a ``Request``."""

    @functools.wraps(command)
    def wrapped(
        config_file: str,
        merge_options: MergeOptions,
        tensor_union: bool,
        tensor_intersection: bool,
        **arguments: Any,
    ) -> None:
        merge_options.apply_global_options()
        request = Request(config_file, merge_options, tensor_union, tensor_intersection)
        command(request, **arguments)

    for add in (
        add_merge_options,
        click.option("--tensor-union", "-u", is_flag=True, help="As of mergekit-pytorch"),
        click.option("--tensor-intersection", "-i", is_flag=True, help="As of mergekit-pytorch"),
        click.argument("config_file", type=click.Path(exists=True, dir_okay=False)),
    ):
        wrapped = add(wrapped)
    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mergekit-ram")
def main() -> None:
    """Look at a RAM merge before it is done, and check it after.

    The commands take the config and the options of mergekit-yaml (or mergekit-pytorch).
    """
    if merge_methods.get("ram") is not BY_NAME["ram"]:
        raise RamError("mergekit-ram is switched off (MERGEKIT_RAM_DISABLE) or could not start.")
    for stream in (sys.stdout, sys.stderr):
        # Names of models may hold what a terminal cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@main.command(cls=PrettyPrintHelp)
@_request
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all counts here")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw them: .png, .svg")
def overlap(request: Request, json_file: Path | None, plot_file: Path | None) -> None:
    """Show how the agents of CONFIG_FILE overlap.

    Reads every model once. Nothing is merged.
    """
    if plot_file is not None:
        figure.check(plot_file)
    for file in (json_file, plot_file):
        if file is not None:
            _check_target(file, request.path)
    report = _measured(request)
    table.show(report, Console())
    try:
        if json_file is not None:
            json_file.write_text(report.to_json(), encoding="utf-8")
        if plot_file is not None:
            figure.draw(report, plot_file)
    except OSError as error:
        raise RamError(f"the report could not be written: {error}") from None


def _check_target(file: Path, config: str) -> None:
    """Say before the models are read that a file cannot be written."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise RamError(f"{file}: its folder does not exist.")
    if file.is_dir():
        raise RamError(f"{file} is a folder; a file is wanted.")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise RamError(f"{file} cannot be written.")
    if file.exists() and file.samefile(config):
        raise RamError(f"{file} is the config itself.")


def _measured(request: Request) -> OverlapReport:
    merges = merges_of([planned.merge for planned in request.plan()])
    try:
        found = measure(merges, devices_of(request.options), quiet=request.options.quiet)
    except (AssertionError, RuntimeError, ValueError, KeyError, OSError) as error:
        if isinstance(error, RamError):
            raise
        LOG.debug("MergeKit's error", exc_info=True)
        raise RamError(f"the models cannot be read: {_text_of(error)}") from error
    return report_on(merges, found)


@main.command(cls=PrettyPrintHelp)
@_request
@click.argument("out_path", required=False)
def check(request: Request, out_path: str | None) -> None:
    """Check CONFIG_FILE and its models for mistakes; no weight is read.

    With OUT_PATH also whether that folder can take the merge. Exit status 1 on errors.
    """
    with collecting() as findings:
        try:
            config = request.config
        except RamError as error:
            findings.append(Finding("error", error.message))
            config = None
        planned = _checked(request, out_path, findings) if config is not None else None
    console = Console(highlight=False)
    for finding in findings:
        style = "bold red" if finding.level == "error" else "bold yellow"
        # Terminals wrap lines by themselves, and paths stay whole for copying.
        console.print(Text.assemble((f"{finding.level}: ", style), finding.message), soft_wrap=True)
    levels = [finding.level for finding in findings]
    counts = [f"{levels.count(level)} {level}s" for level in ("error", "warning")]
    counts = [c.removesuffix("s") if c.startswith("1 ") else c for c in counts]
    looked = f"{planned:,} tensors planned" if planned is not None else "no plan"
    console.print(Text(f"{request.path}: {', '.join(counts)}; {looked}."), soft_wrap=True)
    if "error" in levels:
        raise click.exceptions.Exit(1)


def _checked(request: Request, out_path: str | None, findings: list[Finding]) -> int | None:
    """Run all checks, as far as errors let them; the number of tensors planned."""
    planned: list[Planned] = []

    def look_at_models() -> None:
        if isinstance(request.config, MergeConfiguration):
            preflight.check_models(request.config, request.options, remote=True)

    def plan() -> None:
        if isinstance(request.config, MergeConfiguration):
            preflight.plan_by_headers(request.config, request.options)
        planned.extend(request.plan())

    def look_at_output() -> None:
        if out_path is not None:
            tensors = preflight.PlannedTensors([p.merge for p in planned])
            preflight.check_output(request.config, tensors, out_path, request.options)

    steps: list[Callable[[], None]] = [
        lambda: preflight.check_request(request.config, request.options),
        look_at_models,
        plan,
        look_at_output,
    ]
    for step in steps:
        # Without a plan's inputs in order MergeKit's own errors add nothing.
        if step in (plan, look_at_output) and any(f.level == "error" for f in findings):
            return None
        before = len(findings)
        try:
            step()
        except RamError as error:
            # What MergeKit says late is often what a check has said before it.
            if not any(f.level == "error" for f in findings[before:]):
                findings.append(Finding("error", error.message))
    return len(planned)


@main.command(cls=PrettyPrintHelp)
@_request
@click.argument("merged", type=click.Path(exists=True, file_okay=False, path_type=Path))
def verify(request: Request, merged: Path) -> None:
    """Merge CONFIG_FILE again, tensor by tensor, and compare with the weights in MERGED.

    Exit status 1 if any bit differs.
    """
    console = Console(highlight=False)
    same = differing = 0
    for name, difference in compare(request.plan(), merged, request.options):
        if difference is None:
            same += 1
        else:
            differing += 1
            line = Text.assemble(("differs: ", "bold red"), f"'{name}': {difference}")
            console.print(line, soft_wrap=True)
    if differing:
        summary = f"{differing:,} tensor{'s differ' if differing != 1 else ' differs'}, {same:,} "
        console.print(Text(f"{merged}: {summary}equal bit for bit."), soft_wrap=True)
        raise click.exceptions.Exit(1)
    summary = f"{merged}: all {same:,} tensors are equal bit for bit."
    console.print(Text(summary), soft_wrap=True)
