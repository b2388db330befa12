"""The drafters of a comparison: what each name and its options stand for."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eagle_train.errors import UserError
from eagle_train.inference.drafters import EAGLE
from eagle_train.settings import CONF_DIR
from eagle_train.usage import usage
from evals.bench.contestants import contestants
from tests.support.eval_inputs import make_home
from tests.support.pages import text_of

OWN = str(CONF_DIR.parent / "examples" / "own_drafter.yaml")
NGRAM = "eagle_train.inference.drafters.ngram.make_ngram"


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("contestants")) / "draft"


def test_names_options_files_and_classes(draft):
    given = {
        "eagle": {"draft": str(draft), "tree": "d2_bf2"},
        "last": {"drafter": "eagle", "draft": str(draft), "alignment": "last"},
        "ngram": None,
        "short": {"drafter": "ngram", "max_draft_len": 2},
        "own": {"drafter": OWN, "least": 3},
        "mine": {"_target_": NGRAM, "max_draft_len": 3},
        "trained": {"_target_": NGRAM, "draft": str(draft)},
    }
    eagle, last, ngram, short, own, mine, _ = made = contestants(given, "chain3")
    assert [each.name for each in made] == list(given)
    assert [each.tree for each in made] == ["d2_bf2", *["chain3"] * 6]
    assert eagle.spec == {"_target_": EAGLE, "alignment": "accepted"}
    assert last.spec == {"_target_": EAGLE, "alignment": "last"}
    assert ngram.spec["max_draft_len"] == 4
    assert {**ngram.spec, "max_draft_len": 2} == short.spec
    assert own.spec == {"_target_": "own_drafter.make_last_place", "least": 3}
    assert mine.spec == {"_target_": NGRAM, "max_draft_len": 3}
    assert [each.is_prepared for each in made] == [True, True, False, False, False, False, True]
    assert eagle.about()["training"] == {"tokens": 12345}
    assert (ngram.about()["training"], ngram.about()["draft_source"]) == (None, None)


def test_a_list_and_the_default():
    assert [(each.name, each.spec["_target_"]) for each in contestants(["ngram", OWN], "chain2")] == [
        ("ngram", NGRAM),
        ("own_drafter", "own_drafter.make_last_place"),
    ]
    names = [each.name for each in contestants(None, "chain3")]
    assert {"ngram", "suffix"} <= set(names)
    assert {"eagle", "retrieval", "file", "mine"} & set(names) == set()


def test_files_of_one_name_are_called_by_their_paths(tmp_path):
    files = [tmp_path / folder / name for folder, name in (("a", "ngram.yaml"), ("b", "ngram.yaml"), ("b", "own.yaml"))]
    for least, file in enumerate(files, 1):
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"_target_: {NGRAM}\nmax_draft_len: {least}\n")
    first, second, third = map(str, files)
    made = {each.name: each.spec["max_draft_len"] for each in contestants(["ngram", first, second, third], "chain2")}
    assert made == {"ngram": 4, first: 1, second: 2, "own": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "drafters is empty: give names"),
        ("ngram", "drafters='ngram': must be a mapping of names to options, or a list of names"),
        ([1], r"drafters=\[1\]: must be a mapping"),
        ({"ngram": 3}, "drafters.ngram=3: must be a mapping of options, or null"),
        ({"plain": {"drafter": "ngram"}}, "drafters.plain: is always measured; give another name"),
        (["ngram", "ngram"], "drafters: ngram is there twice; give a mapping, "),
        ({"x": {"drafter": None}}, "drafters.x.drafter=None: must be one of conf/drafter, or FILE.yaml"),
        ({"x": {"drafter": 5}}, "drafters.x.drafter=5: must be one of conf/drafter, or FILE.yaml"),
        ({"x": {"file": 5}}, "drafter.file=5: must be FILE.yaml"),
        (["bigram"], "drafters.bigram: no drafter bigram; there are draft_model, eagle, "),
        (["mine"], "drafters.mine: no drafter mine; there are"),
        ({"ngram": {"max_len": 3}}, "drafters.ngram.max_len: ngram has no such option; it has max_draft_len, "),
        (["retrieval"], "drafters.retrieval.datastore is needed: give retrieval: {datastore: VALUE}"),
        (["eagle"], r"drafters.eagle.draft is needed: must name what eagle-export wrote, \{draft: DIR, ...\}"),
        ({"eagle": {"draft": 3}}, "drafters.eagle.draft=3: must be a directory"),
        ({"eagle": {"draft": "nowhere"}}, "draft=nowhere: no config.json"),
        ({"ngram": {"tree": "chain_9"}}, "tree is 'chain_9'; known trees are"),
        ({"ngram": {"tree": {"parents": [-1]}}}, "drafters.ngram.tree=.*: must draft; plain decoding is always there"),
        (["nowhere.yaml"], "drafter=nowhere.yaml: no such file"),
        ({"own": {"_target_": "pathlib.Path.cwd"}}, "drafter pathlib.Path.cwd: No module named 'pathlib.Path'"),
    ],
)
def test_what_is_no_drafter_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        contestants(given, "chain3")


@pytest.mark.parametrize("option", sorted({path.stem for path in CONF_DIR.glob("drafter/*.yaml")} - {"file", "mine"}))
def test_help_and_guide_name_each_drafter_and_what_it_needs(option):
    described = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "drafter" / f"{option}.yaml"))
    needed = ["draft"] if described["_target_"] == EAGLE else [key for key in described if described[key] == "???"]
    told = {f"# {option}: ": usage(CONF_DIR, "compare", {}), f"| `{option}` | ": text_of("docs/evaluation.md")}
    for start, text in told.items():
        [line] = [line for line in map(str.strip, text.splitlines()) if line.startswith(start)]
        said = line.split("|")[3] if line.startswith("|") else line.partition("; needs ")[2]
        assert re.findall(r"`(\w+)`", said) == needed
