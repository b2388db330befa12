"""Each setting is said once: its dataclass has the default, and a YAML has only what differs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from eagle_train import fields
from eagle_train.cli import compose
from eagle_train.corpus.source import DataConfig
from eagle_train.drafts import KINDS
from eagle_train.inference import EngineConfig
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.loading import TargetConfig
from eagle_train.settings import CONF_DIR
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost.estimate import ClusterConfig
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.train_config import TrainConfig

CLASSES = {
    "cluster": ClusterConfig,
    "data": DataConfig,
    "engine": EngineConfig,
    "optim": OptimConfig,
    "parallel": ParallelConfig,
    "quant": Quant,
    "target": TargetConfig,
    "train": TrainConfig,
}
BASES = {(group, fields.FIELDS): cls for group, cls in CLASSES.items()}
BASES |= {("draft", f"fields_{kind}"): cls for kind, cls in KINDS.items()}
FROM_TARGET = {"num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope_parameters"}
FROM_TARGET |= {"intermediate_size", "max_position_embeddings"}


def default_of(field: dataclasses.Field) -> Any:
    """As Python has it, a tuple as a list."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        return "???"
    return list(field.default) if isinstance(field.default, tuple) else field.default


def test_what_is_read_from_the_source_is_what_python_has():
    assert fields.bases() == sorted(BASES)
    for (group, option), cls in BASES.items():
        expected = {field.name: default_of(field) for field in dataclasses.fields(cls)}
        if group == "data":
            expected["path"] = "???"  # or data.mix; Python's default is None
        if group == "draft":
            expected = {name: None if name in FROM_TARGET else value for name, value in expected.items()}
            # always the target's; and found in the data
            left_out = {"hidden_size", "vocabulary", "target_vocab_size"}
            if option == "fields_medusa":  # without attention
                left_out |= FROM_TARGET | {"first_token", "window", "sink"}
            if option == "fields_peagle":  # without chains
                left_out |= {"norm_output"}
            expected = {name: value for name, value in expected.items() if name not in left_out}
        assert fields.defaults_of(group, option) == expected


def test_a_default_is_shown_as_one_types_it():
    shown = {field.name: field.text for base in BASES for field in fields.fields_of(*base)}
    assert (shown["lr"], shown["tokens_per_step"], shown["betas"]) == ("2e-4", "2097152", "[0.9, 0.95]")
    assert (shown["resume"], shown["minutes"], shown["zero"], shown["norms"]) == ("true", "null", "{}", "eagle1")


NAMES_SPEAK = {"draft": {"num_heads", "num_kv_heads", "head_dim", "num_layers", "rms_norm_eps", "rope_parameters"}}
NAMES_SPEAK["draft"] |= {"max_position_embeddings"}


@pytest.mark.parametrize("base", BASES, ids=str)
def test_help_says_what_each_setting_is(base):
    left_out = NAMES_SPEAK.get(base[0], set())
    assert [each.name for each in fields.fields_of(*base) if not each.comment and each.name not in left_out] == []


def test_a_comment_stands_behind_its_field(tmp_path):
    source = (
        'class A:\n    a: str = "#"  # one # two\n    b: int\n\nclass B(A):\n    b: int = 2  # three\n    c: int = 3'
    )
    (tmp_path / "b.py").write_text(source)
    found = [(each.name, each.value, each.comment) for each in fields._parse_fields(tmp_path / "b.py", "B")]
    assert found == [("a", "#", "one # two"), ("b", 2, "three"), ("c", 3, "")]


def leaves(config: DictConfig, above: str = "") -> dict[str, Any]:
    """Values by their dotted keys; a mapping that is a value is below its own key."""
    found = {}
    for key in config:
        value = OmegaConf.to_container(config, resolve=False)[key]
        if isinstance(value, dict) and not above:
            found |= leaves(config[key], f"{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def options_of(*groups: str) -> list[Path]:
    return sorted(path for group in groups for path in (CONF_DIR / group).glob("*.yaml"))


@pytest.mark.parametrize(
    "path", options_of("draft", *CLASSES.keys() - {"cluster", "train"}), ids=lambda path: f"{path.parts[-2:]}"
)
def test_an_option_says_what_differs_from_its_base(path):
    own = OmegaConf.load(path)
    base = next((each for each in own.pop("defaults", []) if each != "_self_"), None)
    assert base is not None
    before = raw(path.parent.name, base)
    assert [key for key in own if key in before and before[key] == OmegaConf.to_container(own)[key]] == []


def raw(group: str, option: str) -> dict[str, Any]:
    """What an option of a group says together with those that it begins with."""
    if option.startswith(fields.FIELDS):
        return fields.defaults_of(group, option)
    own = OmegaConf.to_container(OmegaConf.load(CONF_DIR / group / f"{option}.yaml"))
    bases = [base for base in own.pop("defaults", []) if base != "_self_"]
    return {key: value for base in bases for key, value in raw(group, base).items()} | own


@pytest.mark.parametrize("path", options_of("experiment"), ids=lambda path: path.stem)
def test_an_experiment_says_what_differs(path):
    own = OmegaConf.load(path)
    chosen = [line.popitem() for line in OmegaConf.to_container(own.pop("defaults", OmegaConf.create([])))]
    plain = compose("train", [f"{key.rpartition('/')[2]}={option}" for key, option in chosen])
    assert [f"{key}={option}" for key, option in chosen if option == default_option(key)] == []
    before = leaves(plain)
    assert [key for key, value in leaves(own).items() if key in before and before[key] == value] == []


def default_option(override: str) -> str:
    """What eagle-train's own YAML chooses for a group."""
    chosen = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "commands" / "train.yaml"))["defaults"]
    options = {key: option for line in chosen if isinstance(line, dict) for key, option in line.items()}
    return options[f"/{override.rpartition('/')[2]}"]
