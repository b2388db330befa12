"""What users may call: the names that each package exports. A change of them is one for users, see CHANGELOG.md."""

import importlib
import inspect

import pytest

from eagle_train.inference import Engine

PUBLIC = {
    "artifacts": """
        Artifact load_draft read_artifact save_draft write_artifact
    """,
    "caching": """
        CacheConfig build_cache verify_cache
    """,
    "corpus": """
        Batch ChatRenderer ChatTemplate Conversation DataConfig Document SourceConfig Stream open_source
    """,
    "diagnosis": """
        CAUSES Diagnosis DoctorConfig Finding examine
    """,
    "drafts": """
        Draft DraftConfig Eagle3Config Eagle3Draft EagleConfig EagleDraft Head Lesson LossSums MedusaConfig MedusaDraft
        MtpConfig MtpDraft PeagleConfig PeagleDraft TargetStates distillation_loss kind_named planned_config
        saved_config shift_hidden
    """,
    "inference": """
        Choice Dispatcher DraftModel DraftRound Drafted Drafter DynamicTree Eagle Engine EngineConfig LayerSkip Needs
        OpenTree Outcome Output Pending PlanTree PrefillServer RemotePrefill Requests RowText RowTrees SamplingParams
        Sequence SimulatedAcceptance Stats TextDrafter TextTree TokenLogprobs Tree TreePlan Update chain connect dynamic
        full pruned
    """,
    "models": """
        Identity Quant Target TargetConfig load_target quant_of quantise_draft
    """,
    "regeneration": """
        RegenerateConfig ServerConfig regenerate
    """,
    "retrieval": """
        DatastoreConfig build_datastore
    """,
    "training": """
        Backend Checkpoint CheckpointStore ClusterConfig CostEstimate Interrupted LossSums MetricsLog
        NoTracker OptimConfig ParallelConfig Tracker TrainConfig TrainState Trainer WandbTracker assemble
        cost_report distillation_loss estimate_cost look_ahead measure_heldout open_checkpoint prepare
    """,
}
INTERNAL = ("eagle_train", "eagle_train.ops")


@pytest.mark.parametrize("package", PUBLIC)
def test_the_exported_names(package):
    module = importlib.import_module(f"eagle_train.{package}")
    assert sorted(module.__all__) == sorted(PUBLIC[package].split())


@pytest.mark.parametrize("package", PUBLIC)
def test_each_exported_name_is_documented(package):
    """A class or function has a docstring of its own; a public method of a class has one, too, or is its protocol's."""
    module = importlib.import_module(f"eagle_train.{package}")
    for name in module.__all__:
        exported = getattr(module, name)
        if inspect.isclass(exported) or inspect.isfunction(exported):
            own = exported.__doc__ or ""
            assert own, f"{package}.{name}"
            assert not own.startswith(f"{name}("), f"{package}.{name}: the docstring is the dataclass's own"


@pytest.mark.parametrize("package", INTERNAL)
def test_what_exports_nothing(package):
    assert not hasattr(importlib.import_module(package), "__all__")


def test_the_engines_verbs():
    own = {name for name in vars(Engine) if not name.startswith("_")}
    assert own == {"add", "cancel", "generate", "has_unfinished", "output", "stage_times", "step"}
