"""Metrics of a run: a step's sums become a record, which goes to `metrics.jsonl` and to a tracker.

A record maps names to numbers, or to lists of numbers, for one step. Knows nothing of models or losses.
DESIGN sections 3.10 and 3.11.
"""

import contextlib
import json
import logging
import netrc
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from eagle_train.distributed import ALONE, World
from eagle_train.errors import UserError, check, one_line
from eagle_train.results import json_text, redact, write_text

Record = dict[str, Any]
_LOG = logging.getLogger(__name__)

_WANDB_MODES = ("online", "offline", "disabled", "shared")
_WANDB_HOST = "api.wandb.ai"  # netrc entries name it even where wandb's default address has another name
_INIT_TIMEOUT = 60  # seconds
_FINISH_TIMEOUT = 30.0  # seconds; clusters that preempt a job give it little more


class Meter:
    """Sums over a step's micro-batches, divided once, when they are read. Tensors stay on their device until then."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}

    def add(self, count: Tensor | float, **sums: Tensor | float) -> None:
        """Add sums over `count` items each: scalars, or tensors of one shape per name."""
        for name, value in {"count": count, **sums}.items():
            self._sums[name] = self._sums.get(name, 0) + value

    def means(self, world: World = ALONE) -> Record:
        """Each sum over all ranks, divided by the count over all ranks: floats, or lists for tensors with a shape.

        NaN where the count is 0. All ranks call it.
        """
        values = [torch.as_tensor(value).detach().double() for value in self._sums.values()]
        device = next((value.device for value in values if value.device.type != "cpu"), torch.device("cpu"))
        flat = world.sum(torch.cat([value.to(device).flatten() for value in values])).cpu()
        parts = flat.split([value.numel() for value in values])
        sums = {name: part.view(value.shape) for name, part, value in zip(self._sums, parts, values, strict=True)}
        count = sums.pop("count")
        return {name: (value / count).tolist() for name, value in sums.items()}


class Tracker(Protocol):
    """Where records go besides `metrics.jsonl`: what `instantiate` (settings.py) makes of config.tracking, with
    `directory` and `config`.

    `show` is given a whole page of HTML, by evals.report alone. `close`: `failed` where an error ended the run.
    """

    def start(self, resumed: bool) -> None: ...

    def log(self, step: int, record: Record) -> None: ...

    def show(self, name: str, page: str) -> None: ...

    def close(self, failed: bool = False) -> None: ...


class NoTracker:
    """A tracker that does nothing: `tracking=none`."""

    def __init__(self, directory: Path | str, config: Mapping[str, Any]) -> None:
        pass

    def start(self, resumed: bool) -> None:
        pass

    def log(self, step: int, record: Record) -> None:
        pass

    def show(self, name: str, page: str) -> None:
        pass

    def close(self, failed: bool = False) -> None:
        pass


class WandbTracker:
    """Weights & Biases, online if there is an API key and offline if there is none. Never prompts for a key.

    The W&B run's id is kept in the run's directory, so that a resumed run continues it. Sent are the records, `config`
    without its secrets, and the machine's load, but not the command line, the code or the console, which may hold
    secrets. Raises UserError if `mode` is unknown or W&B takes no such project, or if no server answers when it is
    started.
    """

    def __init__(
        self,
        directory: Path | str,
        config: Mapping[str, Any],
        project: str | int = "eagle_train",
        entity: str | int | None = None,
        name: str | int | None = None,
        mode: str | None = None,
    ) -> None:
        field, wanted = ("tracking.mode", mode) if mode else ("WANDB_MODE", os.environ.get("WANDB_MODE"))
        check(not wanted or wanted in _WANDB_MODES, f"{field}={wanted}: give one of {', '.join(_WANDB_MODES)}")
        import wandb

        settings = wandb.setup().settings
        has_key = settings.api_key or settings.identity_token_file or _in_netrc(settings.base_url)
        check(has_key or wanted != "online", f"{field}=online: no W&B API key; set WANDB_API_KEY or use offline")
        mode = wanted or settings.mode
        if mode == "online" and not has_key:
            mode = "offline"
            _LOG.info("W&B: no API key, so the run is recorded offline in %s/wandb", directory)
        try:
            wandb.Settings(project=str(project))
        except wandb.errors.Error as error:
            raise UserError(f"tracking.project={project}: {one_line(error)}") from error
        named = {"project": project, "entity": entity, "name": name}  # 7 is typed as a number, and is a name here
        texts = {key: None if value is None else str(value) for key, value in named.items()}
        self.directory = Path(directory)
        self.arguments = {**texts, "mode": mode, "config": redact(config)}
        self.wandb = wandb

    def start(self, resumed: bool) -> None:
        """Begin a W&B run, or continue the one that this directory belongs to."""
        id_file = self.directory / "wandb_run_id"
        if not (resumed and id_file.exists()):
            write_text(id_file, secrets.token_hex(8))
        settings = self.wandb.Settings(
            init_timeout=_INIT_TIMEOUT, console="off", x_disable_meta=True, disable_git=True, disable_code=True
        )
        # Without one a lost network would keep a run from its end, or from leaving a node that is preempted.
        if hasattr(settings, "finish_timeout") and "WANDB_FINISH_TIMEOUT" not in os.environ:  # older ones have none
            settings.finish_timeout = _FINISH_TIMEOUT
        try:
            self.run = self.wandb.init(
                **self.arguments, dir=self.directory, id=id_file.read_text(), resume="allow", settings=settings
            )
        except self.wandb.errors.Error as error:
            remedy = "tracking.mode=offline records in the run's directory"
            raise UserError(f"tracking=wandb: {one_line(error)} ({remedy})") from error

    def log(self, step: int, record: Record) -> None:
        # After a kill the resumed run repeats steps that the server already has, and W&B would warn of each.
        if step >= self.run.step:
            self.run.log(dict(_flatten(record)), step=step)

    def show(self, name: str, page: str) -> None:
        """A page of HTML, under this name."""
        self.run.log({name: self.wandb.Html(page, inject=False)})

    def close(self, failed: bool = False) -> None:
        self.run.finish(exit_code=int(failed))


def _in_netrc(base_url: str) -> bool:
    """Whether the user's netrc file has a key for this server, as `wandb login` writes it."""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    # wandb cannot read a missing or malformed file either, and would then prompt for a key.
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        entries = netrc.netrc(path)
        return any(entries.authenticators(host) for host in (urlsplit(base_url).netloc, _WANDB_HOST))
    return False


def _flatten(record: Record) -> Iterator[tuple[str, Any]]:
    """A record with each list as one entry per item, counted from 1: W&B draws no lists."""
    for name, value in record.items():
        if isinstance(value, list):
            yield from ((f"{name}/{number}", item) for number, item in enumerate(value, 1))
        else:
            yield name, value


class MetricsLog:
    """Writes each record as a line of `metrics.jsonl` in the run's directory, at once, and passes it to the tracker.

    `resumed_step`: the step of the checkpoint that the run continues from, 0 if it has none yet, None for a new run.
    Records of later steps are removed, so that the file of a resumed run equals that of an uninterrupted one, except
    for times. NaN and infinities are written as null, because JSON has neither.
    """

    def __init__(self, directory: Path | str, tracker: Tracker, resumed_step: int | None = None) -> None:
        self.path = Path(directory) / "metrics.jsonl"
        write_text(self.path, "".join(_kept_lines(self.path, resumed_step)))
        # Unbuffered: a line is in the file at once, and a failed write is not repeated when the file is closed.
        self._file = self.path.open("ab", buffering=0)
        self._unwritten = b""
        self._tracker = tracker
        tracker.start(resumed=resumed_step is not None)

    def log(self, step: int, record: Record) -> None:
        """Write one record, after those that the disk refused before. Where it refuses again, or the tracker fails,
        that is told in the log, and the run goes on."""
        self._unwritten += (json_text({"step": step, **record}) + "\n").encode()
        self._write(step)
        self._track(lambda: self._tracker.log(step, record))

    def close(self, failed: bool = False) -> None:
        """`failed`: an error ended the run."""
        if self._unwritten:
            self._write(None)
        try:
            self._file.close()
        except OSError as error:  # network file systems may refuse only here what they took before
            _LOG.warning("%s: the last records may be missing: %s", self.path, one_line(error))
        self._track(lambda: self._tracker.close(failed))

    def _write(self, step: int | None) -> None:
        """Write what is not written yet; what the disk refuses stays for the next time. `step`: None at the end."""
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten)  # perhaps a part, where a quota ends within it
                self._unwritten = self._unwritten[written:]
        except OSError as error:
            then = "are lost" if step is None else "are written with the next one"
            lines = self._unwritten.count(b"\n")
            _LOG.warning("%s cannot be written: %s; %d records %s", self.path, one_line(error), lines, then)

    def _track(self, call: Callable[[], None]) -> None:
        """Call the tracker; one that fails is told of once, and is not called again."""
        try:
            call()
        except Exception as error:  # a service of others, which may die or lose its network, and raises what it likes
            told = f"{type(error).__name__}: {one_line(error)}"
            _LOG.warning("the tracker failed, and the run goes on without it (%s has all records): %s", self.path, told)
            self._tracker = NoTracker(self.path.parent, {})


def _kept_lines(path: Path, resumed_step: int | None) -> Iterator[str]:
    """The complete lines of an earlier part of the run, up to `resumed_step`."""
    if resumed_step is None or not path.exists():
        return
    for number, line in enumerate(path.read_text("utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):  # torn by a kill
            return
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError) as error:
            raise UserError(f"{path}:{number}: not a record of this run; remove the line to resume") from error
        if step <= resumed_step:
            yield line


def summary(loss: float, tokens_per_s: float) -> str:
    """A step's numbers beside the progress bar."""
    return f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s"
