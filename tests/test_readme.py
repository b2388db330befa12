"""What README, the other pages, the YAMLs' comments and the launch scripts name is there: commands, files, keys, values
and figures.
"""

import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from docs import figure
from eagle_train.cli import OPEN, as_typed, compose, named_path
from eagle_train.corpus import stream
from eagle_train.fields import bases, defaults_of
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.requests.sampling_keys import KEYS
from eagle_train.settings import CONF_DIR
from eagle_train.training import runaway
from tests.support.pages import PAGES, ROOT, codes, text_of

YAMLS = sorted(str(path.relative_to(ROOT)) for path in CONF_DIR.rglob("*.yaml"))
SCRIPTS = sorted(str(path.relative_to(ROOT)) for end in ("sh", "sbatch") for path in ROOT.glob(f"launch/**/*.{end}"))
CONFIGS = sorted(path.stem for path in CONF_DIR.glob("commands/*.yaml") if path.stem != "command")
# What starts a command that takes overrides, and the config that it has.
COMMANDS = {f"python -m evals.{name}": name for name in CONFIGS if (ROOT / "evals" / f"{name}.py").exists()} | {
    "eagle-train": "train",
    "eagle-export": "export",
    "eagle-generate": "generate",
    "eagle-regenerate": "regenerate",
    "eagle-datastore": "datastore",
    "eagle-cache": "cache",
    "eagle-doctor": "doctor",
    "bash launch/quickstart.sh": "train",
    "bash launch/torchrun.sh": "train",
    "launch/slurm/train.sbatch": "train",
    "-m eagle_train.generate": "generate",
}
# What CONTRIBUTING has the reader make.
TO_BE_MADE = {
    "conf/target/qwen3_8b.yaml",
    "conf/tree/comb.yaml",
    "conf/data/dialog.yaml",
    "eagle_train/corpus/tsv_files.py",
    "conf/drafter/bigram.yaml",
    "conf/drafter/lookup.yaml",
    "eagle_train/inference/drafters/bigram.py",
    "tests/inference/drafters/test_bigram.py",
}
FILE = re.compile(r"(?<![\w/.*-])(?:eagle_train|conf|launch|data|tests|evals|docs)/[\w./-]*\w")
OVERRIDE = re.compile(r"(?<![\w./\[-])([a-z]\w*(?:\.\w+)+)=(?!=)")


@pytest.fixture(scope="module", autouse=True)
def hydra_once() -> Iterator[None]:
    with initialize_config_dir(str(CONF_DIR.resolve()), version_base="1.3"):
        yield


def comments(text: str) -> str:
    return "\n".join(line.partition("#")[2].lstrip("# ") for line in text.splitlines() if "#" in line)


def composed(name: str, words: list[str]) -> DictConfig:
    """A command's config with the overrides among `words`, as the command itself takes them."""
    parser = OverridesParser.create()
    given = [each for word in words if "=" in word and not word.startswith("-") for each in named_path(word)]
    return compose(name, [as_typed(each, parser) for each in given])


def below(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted names of a mapping's keys, those within it included."""
    for key, value in values.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from below(value, f"{above}{key}.")


@cache
def keys() -> frozenset[str]:
    """Of all commands and of all options of their groups, and what Python's interface has."""
    own = [key for name in CONFIGS for key in below(OmegaConf.to_container(compose(name, [])))]
    files = [path for path in CONF_DIR.glob("*/*.yaml") if path.parent.name not in ("experiment", "commands")]
    groups = [key for path in files for key in below({path.parent.name: OmegaConf.to_container(OmegaConf.load(path))})]
    groups += [key for group, option in bases() for key in below({group: defaults_of(group, option)})]
    python = [key for cls in (Engine, SamplingParams) for key in inspect.signature(cls).parameters]
    return frozenset(["experiment", *own, *groups, *python])


def commands(page: str) -> list[tuple[str, str, list[str]]]:
    """(config, line, its words) of each command on a page."""
    found = []
    for line in codes(page):
        for start, name in COMMANDS.items():
            _, here, rest = f" {line} ".partition(f"{start} ")
            if here:
                found.append((name, line, shlex.split(rest, comments=True)))
    return found


@pytest.mark.parametrize("file", PAGES)
def test_each_command_takes_what_it_is_given(file):
    assert all(composed(name, words) for name, _, words in commands(file))


def test_the_commands_are_found():
    found = [each for page in PAGES for each in commands(page)]
    assert len(found) > 20
    assert {name for name, _, _ in found} > {"train", "export", "generate", "latency", "switches"}


@pytest.mark.parametrize("file", [*PAGES, *YAMLS, *SCRIPTS])
def test_each_override_is_one(file):
    said = "\n".join(codes(file)) if file in PAGES else comments(text_of(file))
    given = {found[1] for found in OVERRIDE.finditer(said)}
    assert {key for key in given - keys() if not key.startswith(OPEN)} == set()


@pytest.mark.parametrize("file", [*PAGES, *YAMLS, *SCRIPTS])
def test_each_file_is_there(file):
    """As it stands, or from the package on."""
    named = {found[0] for found in FILE.finditer(text_of(file))} - TO_BE_MADE
    assert {each for each in named if not any((ROOT / above / each).exists() for above in ("", "eagle_train"))} == set()


def test_the_quickstarts_figures_are_the_published_ones():
    figures, page = json.loads(text_of("evals/results/quickstart_avx512.json")), text_of("README.md")
    assert f"\nTPC {figures['tpc']:.2f} (" in page
    assert f"\nspeed-up over plain decoding {figures['speedup']:.2f} (" in page
    assert f"\nTTIT {1e3 * figures['ttit_s']:.2f} ms, " in page
    slower, words = json.loads(text_of("evals/results/quickstart_avx2.json")), " ".join(page.split())
    assert f"reached a TPC of {slower['tpc']:.2f} (" in words


def result(name: str) -> Any:
    return json.loads(text_of(f"evals/results/{name}.json"))


def ratio(name: str, decoding: str, other: str, key: str = "tokens_per_s") -> float:
    """Of a figure of two decodings, of their first rows."""
    first, second = (next(r for r in result(name)["rows"] if r["decoding"] == each) for each in (decoding, other))
    return first[key] / second[key]


def speedups(decoding: str) -> str:
    """A row of the comparison's table, after its name."""
    rows = {row["batch_size"]: row for row in result("compare")["rows"] if row["decoding"] == decoding}
    shown = {size: (rows[size]["speedup"], *rows[size]["speedup_interval"]) for size in (1, 4, 8)}
    return " | ".join(f"{mean:.2f} ({low:.2f} to {high:.2f})" for mean, low, high in shown.values())


def figures() -> Iterator[tuple[str, str]]:
    """(page, what it says), with the figures that the published results have."""
    prompt_lookup, assisted = (("ngram", "transformers, prompt lookup"), ("draft_model", "transformers, assisted"))
    one, three = (ratio(name, "chain3", "plain") for name in ("latency_one_layer", "latency"))
    yield "evaluation", f"it gives {one:.2f} times the tokens/s of plain decoding"
    yield "evaluation", f"where three layers give {three:.2f}"
    one, three = (1 / ratio(name, "chain3", "plain", "ttit_s") for name in ("latency_one_layer", "latency"))
    yield "evaluation", f"{one:.2f} between one token and the next, where three give {three:.2f}"
    yield "evaluation", f"{ratio('latency', 'plain', 'transformers'):.2f} times as fast as `transformers.generate`"
    yield "evaluation", f"n-gram lookup has {ratio('compare', *prompt_lookup):.2f} times the tokens per second"
    yield "evaluation", f"a draft model of three layers {ratio('compare', *assisted):.2f} times those"
    both = [ratio("compare_compiled", *each) for each in (prompt_lookup, assisted)]
    yield "evaluation", f"with `engine.compile=true`, {both[0]:.2f} and {both[1]:.2f} times"
    decodings = [row["decoding"] for row in result("compare")["rows"] if row["batch_size"] == 8][1:]  # but plain
    yield from (("evaluation", f"| {speedups(each)} |") for each in decodings)
    step = result("train_throughput")
    yield "evaluation", f"{step['faster_than_naive']:.1f} times the tokens a second, with {step['memory_of_naive']:.2f}"
    stream, again = (result(name)["grown_mb"] for name in ("stream_memory", "stream_memory_gsm8k"))
    yield "evaluation", f"grew by {stream:.1f} MB over 100 MB of documents, and by {again:.1f} MB over GSM8K"
    loss, loading = result("loss_memory"), result("load_memory")["peak_share"]
    yield "evaluation", f"{loss['extra_gb']:.2f} GB, where both models' logits would take {loss['naive_logits_gb']:.1f}"
    yield "evaluation", f"{loading['fsdp2']:.2f} times its bytes with FSDP2, and of {loading['tensor']:.2f} with tensor"
    none, fp8, int4 = (result("quantisation")["schemes"][name] for name in ("none", "fp8", "int4"))
    yield "export", f"drafting takes {fp8['relative_draft_latency']:.2f} times as long on two cores"
    yield "experiments", f"INT4 {100 * int4['tpc_change']:+.1f} %, {int4['tpc']:.2f} and {none['tpc']:.2f}"
    yield "experiments", f"FP8 {100 * fp8['tpc_change']:+.1f} % (`evals/results/quantisation.json`"
    one, three = (result(name) for name in ("latency_one_layer", "latency"))
    asked = f"over {one['config']['repeats']} prompts where three layers have {three['tpc']:.2f}"
    yield "evaluation", f"has a TPC of {one['tpc']:.2f} {asked}"
    for by_tree in result("draft_kinds_equal_tokens")["speedups"].values():
        shown = ("{:.2f} ({:.2f} to {:.2f})".format(one["speedup"], *one["interval"]) for one in by_tree.values())
        yield "experiments", f"| {' | '.join(shown)} |"
    kinds = result("draft_kinds_equal_tokens")["parts"][0]["variants"]
    below = {name: {key: -number for key, number in one["gain"]["chain3"].items()} for name, one in kinds.items()}
    more = {name: "{tpc:.2f} ({high:.2f} to {low:.2f}) above".format(**each) for name, each in below.items()}
    said = f"EAGLE is {more['mtp']} MTP, {more['eagle3']} EAGLE-3, {more['peagle']} P-EAGLE and {more['medusa']} Medusa"
    yield "experiments", said


@pytest.mark.parametrize(("page", "said"), list(figures()))
def test_figures_of_the_guides_are_the_published_ones(page, said):
    assert said in " ".join(text_of(f"docs/{page}.md").split())


def test_the_speed_ups_of_short_trainings_are_told():
    """One of them was below 1 for each kind of draft; the page has TPC in a table."""
    said = " ".join(text_of("docs/experiments.md").split())
    for by_tree in result("draft_kinds")["speedups"].values():
        one = by_tree["chain3"]
        assert f"{one['speedup']:.2f} ({one['interval'][0]:.2f} to {one['interval'][1]:.2f}) with " in said


def test_commands_without_the_group_drafter_are_named():
    said = text_of("docs/DESIGN.md").partition("Every command that decodes")[2].partition("have no such group")[0]
    texts = {path.stem: path.read_text("utf-8") for path in ROOT.glob("conf/commands/*.yaml")}
    without = [name for name, text in texts.items() if "- /engine:" in text and "- /drafter:" not in text]
    assert len(without) > 4
    assert all(f"`evals.{name}`" in said for name in without)


def test_the_keys_for_long_jobs_have_these_defaults():
    said = text_of("docs/training.md").partition("\n## Keys for long jobs\n")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+\.\w+)` \| (\w+) \|", said, re.MULTILINE))
    config = compose("train", [])
    assert len(told) > 6
    assert {key: float(value) if value.isdigit() else value for key, value in told.items()} == {
        key: OmegaConf.select(config, key) for key in told
    }
    for number in (runaway._RECENT, stream._FEW_MALFORMED):
        assert re.search(rf"\b{number}\b", said)


def test_the_evaluations_that_take_the_keys_of_sampling_are_named():
    said = text_of("docs/evaluation.md").partition("These evaluations take them:")[2].partition("Reports name")[0]
    named = {name for name in CONFIGS if re.search(rf"`evals\.{name}`", said)}
    taken = [name for name in CONFIGS if set(KEYS) & compose(name, []).keys()]
    assert named == {name for name in taken if (ROOT / "evals" / f"{name}.py").exists()}
    assert all(set(KEYS) <= compose(name, []).keys() for name in taken)
    assert all(f"`{key}`" in text_of("docs/evaluation.md") for key in KEYS)


def test_each_published_result_is_named_on_a_page():
    named = "\n".join(map(text_of, PAGES))
    assert [path.name for path in ROOT.glob("evals/results/*.json") if path.name not in named] == []


def test_readme_names_each_example():
    named = text_of("README.md").partition("\n## Examples\n")[2].partition("\n## ")[0]
    assert [path.name for path in ROOT.glob("examples/*.*") if f"`{path.name}`" not in named] == []


def test_the_picture_shows_the_published_figures(tmp_path, monkeypatch):
    """`python docs/figure.py` draws it; another release of matplotlib may place its texts elsewhere."""
    monkeypatch.setattr(figure, "PICTURE", tmp_path / "speedup.svg")
    figure.main()
    drawn, committed = (
        path.read_text("utf-8") for path in (tmp_path / "speedup.svg", ROOT / "docs/figures/speedup.svg")
    )
    texts = [re.findall(r"<text [^>]*>([^<]+)</text>", each) for each in (drawn, committed)]
    assert texts[0] == texts[1]
    assert "248" in texts[0]


@pytest.mark.parametrize("file", PAGES)
def test_each_link_leads_to_a_file(file):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(file))
    inside = [link for link in links if not link.startswith("https://")]
    assert [link for link in inside if not (ROOT / file).parent.joinpath(link).exists()] == []


def test_each_public_package_has_a_page_of_the_reference():
    """One that names what is public; the page shows just that."""
    packages = {file.parent.relative_to(ROOT) for file in ROOT.glob("eagle_train/**/__init__.py")}
    public = {".".join(path.parts) for path in packages if "__all__ = [" in text_of(f"{path}/__init__.py")}
    pages = {path.stem: path.read_text("utf-8") for path in ROOT.glob("docs/api/*.md")}
    assert public <= {f"eagle_train.{name}" for name in pages}
    assert all(f"\n::: eagle_train.{name}\n" in page for name, page in pages.items())
    assert all(f"eagle_train.{name}: api/{name}.md" in text_of("mkdocs.yml") for name in pages)
